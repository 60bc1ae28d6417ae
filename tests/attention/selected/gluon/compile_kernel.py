"""Compiles the Gluon kernel for Hopper and prints what it needs, one JSON object a target.

    python -m tests.attention.selected.gluon.compile_kernel 512-bf16 576-fp16

A target is width-dtype. A command of its own, since a process that interprets kernels cannot compile them.
"""

import json
import re
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from attention.selected.gluon_impl import DEFAULT, _sparse_attn_kernel, constants

TENSORS = ("q_source", "kv_source", "out")
SPILL = r"\b(?:STL|LDL)\b"


def compile_kernel(width: int, dtype: str) -> dict[str, Any]:
    """Shared memory in bytes, and counts of instructions of the machine code."""
    fixed = constants(width, DEFAULT[width])

    def type_of(name: str) -> str:
        if name in fixed:
            return "constexpr"
        if name in TENSORS:
            return f"*{dtype}"
        return {"sink_source": "*fp32", "lists": "*i32", "scale_log2": "fp32"}.get(name, "i32")

    names = _sparse_attn_kernel.arg_names
    source = GluonASTSource(
        _sparse_attn_kernel,
        {name: type_of(name) for name in names},
        fixed,
        {(names.index(name),): [["tt.divisibility", 16]] for name in (*TENSORS, "sink_source", "lists")},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    sass = compiled.asm["sass"]

    def count(pattern: str) -> int:
        return len(re.findall(pattern, sass))

    return {
        "shared_bytes": compiled.metadata.shared,
        "products": count(r"\bHGMMA\."),
        "waits_for_products": count(r"\bWARPGROUP\.DEPBAR"),
        "asynchronous_copies": count(r"\bLDGSTS\.\S*128\b"),
        "spills": count(SPILL),
        "spills_of_consumers": sum(
            len(re.findall(SPILL, part)) for part in sass.split("USETMAXREG") if "HGMMA" in part
        ),
    }


if __name__ == "__main__":
    for target in sys.argv[1:]:
        width, dtype = target.split("-")
        print(json.dumps(compile_kernel(int(width), dtype)))
