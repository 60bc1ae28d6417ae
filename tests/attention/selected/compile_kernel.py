"""Compiles the kernel for GPUs that are not there and prints what it needs, one JSON object a target.

    python -m tests.attention.selected.compile_kernel 90-64-512-bf16 89-128-576-bf16

A target is capability-heads-width-dtype. A command of its own, since a process that interprets kernels cannot
compile them.
"""

import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attention.selected.triton_impl import _sparse_attn_kernel, parts, tile_config

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TENSORS = ("q_source", "kv_source", "out")


def compile_kernel(capability: int, heads: int, width: int, dtype: str) -> dict[str, Any]:
    """Shared memory in bytes, and how often the PTX names Hopper's matrix and asynchronous 16-byte copy."""
    config = tile_config(DTYPES[dtype], width, heads, hopper=capability in (90, 100))
    main, rest = parts(width)
    constants: dict[str, Any] = {
        "WIDTH": width,
        "MAIN": main,
        "REST": rest,
        "BLOCK_H": config.block_h,
        "BLOCK_N": config.block_n,
        "SPLIT_KEYS": config.split_keys,
        "STRIDE_UNIT": 8,
        "INTERPRETED": False,
    }

    def type_of(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in TENSORS:
            return f"*{dtype}"
        return {"sink_source": "*fp32", "lists": "*i32", "scale_log2": "fp32"}.get(name, "i32")

    names = _sparse_attn_kernel.arg_names
    source = ASTSource(
        _sparse_attn_kernel,
        {name: type_of(name) for name in names},
        constants,
        {(names.index(name),): [["tt.divisibility", 16]] for name in (*TENSORS, "sink_source", "lists")},
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": config.num_warps, "num_stages": config.num_stages},
    )
    ptx = compiled.asm["ptx"]
    return {
        "shared_bytes": compiled.metadata.shared,
        "wgmma": ptx.count("wgmma.mma_async"),
        "asynchronous_copies": ptx.count("cp.async.cg"),
    }


if __name__ == "__main__":
    for target in sys.argv[1:]:
        capability, heads, width, dtype = target.split("-")
        print(json.dumps(compile_kernel(int(capability), int(heads), int(width), dtype)))
