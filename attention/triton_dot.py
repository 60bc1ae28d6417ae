"""The matrix product that every Triton kernel here uses."""

import triton
import triton.language as tl


@triton.jit
def dot(a, b, acc, INTERPRETED: tl.constexpr):
    """float32 a @ b + acc. The interpreter multiplies bfloat16 as integers, so there it is widened first."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    # tf32 would cost float32 callers three digits; narrower dtypes do not look at input_precision.
    return tl.dot(a, b, acc, input_precision="ieee")
