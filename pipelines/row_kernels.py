"""Triton kernels that read a row once: quantising to e4m3, after GELU or not, and norm with rotary embedding.

Knows: rows of matrices on a GPU. Does not know: layers, or when a kernel is the better way; the same in
PyTorch is beside the callers (``fp8.py``, ``joined_attention.py``).
"""

# Kernels are compiled by Triton; their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

_LARGEST = tl.constexpr(448.0)
_SMALLEST_SCALE = tl.constexpr(1e-12)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _gelu(x, INTERPRETED: tl.constexpr):
    """GELU by tanh; its error, 2**-11 of the tanh, vanishes in the rounding to e4m3."""
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    if INTERPRETED:
        small = tl.exp(-2.0 * tl.abs(inner))
        tanh = tl.where(inner < 0, -1.0, 1.0) * (1.0 - small) / (1.0 + small)
    else:
        tanh = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [inner], dtype=tl.float32, is_pure=True, pack=1
        )
    return 0.5 * x * (1.0 + tanh)


@triton.jit
def store_quantised(
    out, scales, row, there, a, b, FIRST: tl.constexpr, REST: tl.constexpr, COLUMNS: tl.constexpr
):
    """Both parts of rows, float32 and zeros beyond their end, stored as e4m3 and the scale of each."""
    most = tl.maximum(tl.reduce(tl.abs(a), 1, _larger), tl.reduce(tl.abs(b), 1, _larger))
    scale = tl.maximum(most / _LARGEST, _SMALLEST_SCALE)
    tl.store(scales + row, scale, mask=there)
    factor = (1.0 / scale)[:, None]
    a = tl.minimum(tl.maximum(a * factor, -_LARGEST), _LARGEST)
    b = tl.minimum(tl.maximum(b * factor, -_LARGEST), _LARGEST)
    rest = FIRST + tl.arange(0, REST)[None, :]
    out += (row * COLUMNS)[:, None]
    tl.store(out + tl.arange(0, FIRST)[None, :], a.to(tl.float8e4nv), mask=there[:, None])
    tl.store(out + rest, b.to(tl.float8e4nv), mask=there[:, None] & (rest < COLUMNS))


@triton.jit(do_not_specialize=["rows"])
def _quantise_kernel(
    source, out, scales, stride_row, rows,
    COLUMNS: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr,
    GELU: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """ROWS rows, in registers: the first FIRST columns, and those after them filled up to REST."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    source += (row * stride_row)[:, None]
    # A row without a rest loads one column of it, masked away, for nothing.
    rest = FIRST + tl.arange(0, REST)[None, :]
    a = tl.load(source + tl.arange(0, FIRST)[None, :], mask=there[:, None], other=0.0).to(tl.float32)
    b = tl.load(source + rest, mask=there[:, None] & (rest < COLUMNS), other=0.0).to(tl.float32)
    if GELU:
        a = _gelu(a, INTERPRETED)
        b = _gelu(b, INTERPRETED)  # of zero, zero
    store_quantised(out, scales, row, there, a, b, FIRST, REST, COLUMNS)


def quantise_rows_triton(x: Tensor, *, gelu: bool = False) -> tuple[Tensor, Tensor]:
    """[rows, columns], dense rows -> the same, or its GELU, in e4m3; float32 [rows, 1] to multiply it by."""
    rows, columns = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    first = 1 << (columns.bit_length() - 1)
    # Rows of a program and its warps: what was fastest on an H200 (docs/notes.md).
    rows_of_program, warps = (2, 2) if columns <= 2048 else (1, 4)
    if rows:
        _quantise_kernel[(triton.cdiv(rows, rows_of_program),)](
            x,
            out,
            scales,
            x.stride(0),
            rows,
            COLUMNS=columns,
            FIRST=first,
            REST=triton.next_power_of_2(max(columns - first, 1)),
            ROWS=rows_of_program,
            GELU=gelu,
            INTERPRETED=x.device.type == "cpu",
            num_warps=warps,
        )
    return out, scales


@triton.jit(do_not_specialize=["tokens"])
def _norm_rotate_kernel(
    qkv, q_weight, k_weight, cos, sin, tokens, eps,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEADS_PADDED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The q (program 0 of the second axis) or k (program 1) of one token, in place."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    heads = tl.arange(0, HEADS_PADDED)
    columns = tl.arange(0, HEAD_DIM)
    pairs = tl.arange(0, HEAD_DIM // 2)
    at = heads[:, None] * HEAD_DIM + columns[None, :]
    mask = (heads < HEADS)[:, None] & (columns < HEAD_DIM)[None, :]
    qkv += (row * PARTS + part) * (HEADS * HEAD_DIM)
    weight = q_weight if part == 0 else k_weight
    x = tl.load(qkv + at, mask=mask, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    mean = tl.sum(tl.sum(x * x, 1), 0) / (HEADS * HEAD_DIM)
    scaled = x * tl.rsqrt(mean + eps) * tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    # As the norm would store it.
    scaled = scaled.to(dtype).to(tl.float32)
    even, odd = tl.split(tl.reshape(scaled, [HEADS_PADDED, HEAD_DIM // 2, 2]))
    table = (row % tokens) * (HEAD_DIM // 2) + pairs
    c = tl.load(cos + table)[None, :]
    s = tl.load(sin + table)[None, :]
    rotated = tl.join(even * c - odd * s, even * s + odd * c)
    tl.store(qkv + at, tl.reshape(rotated, [HEADS_PADDED, HEAD_DIM]).to(dtype), mask=mask)


def norm_and_rotate_triton(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, heads: int, eps: float
) -> None:
    """As ``joined_attention.norm_and_rotate_``; head_dim is a power of two, all is dense."""
    batch, tokens, width = qkv.shape
    head_dim = width // 3 // heads
    if batch * tokens:
        _norm_rotate_kernel[(batch * tokens, 2)](
            qkv,
            q_weight,
            k_weight,
            cos,
            sin,
            tokens,
            eps,
            HEADS=heads,
            HEAD_DIM=head_dim,
            HEADS_PADDED=triton.next_power_of_2(heads),
            PARTS=3,
            num_warps=4,
        )
