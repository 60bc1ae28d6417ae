"""Compiles the kernel for GPUs that are not there and prints what it needs, one JSON object a target.

    python -m tests.attention.window_sink.compile_kernel 89-64-bf16-null_logit 90-64-bf16-key0_bias-frames

A target is capability-head_dim-dtype-sinks, with -frames behind it for a wide window in units with globals. A
command of its own, since a process that interprets kernels cannot compile them.
"""

import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attention.window_sink.triton_impl import _window_sink_kernel, tile_config

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DIVISIBLE_BY_16 = ("q_source", "k_source", "v_source", "out")


def compile_kernel(
    capability: int, head_dim: int, dtype: str, sinks: str, kind: str = "plain"
) -> dict[str, Any]:
    """Shared memory in bytes, and how often the PTX names Hopper's matrix and asynchronous 16-byte copy."""
    columns = triton.next_power_of_2(head_dim)
    plain = kind == "plain"
    config = tile_config(DTYPES[dtype], columns, hopper=capability in (90, 100), wide=not plain)
    constants: dict[str, Any] = {
        "HEAD_DIM": head_dim,
        "COLUMNS": columns,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "FEWEST_INNER": config.fewest_inner,
        "PLAIN": plain,
        "SINK_MODE": None if sinks == "none" else sinks,
        "STRIDE_UNIT": 8,
        "INTERPRETED": False,
    }
    if sinks == "none":
        constants["sinks"] = None

    def type_of(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in ("q_source", "k_source", "v_source", "out"):
            return f"*{dtype}"
        return {"cu_seqlens": "*i32", "sinks": "*fp32", "scale_log2": "fp32"}.get(name, "i32")

    names = _window_sink_kernel.arg_names
    source = ASTSource(
        _window_sink_kernel,
        {name: type_of(name) for name in names},
        constants,
        {(names.index(name),): [["tt.divisibility", 16]] for name in DIVISIBLE_BY_16},
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
        capability, head_dim, *rest = target.split("-")
        print(json.dumps(compile_kernel(int(capability), int(head_dim), *rest)))
