"""Compiles the kernels for GPUs that are not there and prints what they need, one JSON object a target.

    python -m tests.attention.block_topk.compile_kernel 89-128-bf16 90-128-bf16-rest

A target is capability-head_dim-dtype, with ``rest`` if boxes that are not kept take part. A command of its
own, since a process that interprets kernels cannot compile them.
"""

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attention.block_topk import triton_impl, triton_selection

SOURCES = {"q_source": "block_m", "k_source": "block_n", "v_source": "block_n"}
INT32 = dict.fromkeys(("tiles", "whole", "partial", "counts", "bounds", "kept"), "*i32")
FLOAT32 = dict.fromkeys(("scores", "rest_bias", "means", "log2_lengths"), "*fp32")
BOXES = 1024


def compile_kernel(capability: int, head_dim: int, dtype: str, rest: bool) -> dict[str, Any]:
    """Shared memory in bytes of the attention kernel and the most of the others, and how often the PTX of the
    first names Hopper's matrix and copy instructions."""
    columns = triton.next_power_of_2(head_dim)
    tables = {"fp32": triton_impl._FLOAT32}
    hopper = capability // 10 in (9, 10)
    config = tables.get(dtype, triton_impl._HOPPER if hopper else triton_impl._OTHER)[columns]
    tma = hopper and columns == head_dim
    head = {"HEAD_DIM": head_dim, "COLUMNS": columns}
    tiles = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
    walks = {"READ_AHEAD": config.read_ahead, "EDGE_STAGES": config.edge_stages}
    known = INT32 | FLOAT32 | {"always": "*i1", "tally": "*i64", "scale_log2": "fp32"}

    def compiled(kernel: Any, constants: dict[str, Any], **options: int) -> Any:
        def type_of(name: str) -> str:
            if name in constants:
                return "constexpr"
            if name in SOURCES and tma:
                return f"tensordesc<{dtype}[{getattr(config, SOURCES[name])},{head_dim}]>"
            if name in (*SOURCES, "out", "source", "rest_keys", "rest_values"):
                return f"*{dtype}"
            return known.get(name, "i32")

        signature = {name: type_of(name) for name in kernel.arg_names}
        target = GPUTarget("cuda", capability, 32)
        return triton.compile(ASTSource(kernel, signature, constants), target=target, options=options)

    attends = compiled(
        triton_impl._block_topk_kernel,
        head | tiles | walks | {"REST": rest, "TMA": tma, "INTERPRETED": False},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    lists = {"BOXES": BOXES, "BLOCK_N": config.block_n, "REST": rest, "TALLY": True}
    others = [
        compiled(triton_selection._mean_kernel, head | {"ROWS": 32}),
        compiled(triton_selection._list_kernel, lists, num_warps=4),
    ]
    ptx = attends.asm["ptx"]
    return {
        "shared_bytes": attends.metadata.shared,
        "shared_bytes_of_selection": max(other.metadata.shared for other in others),
        "wgmma": ptx.count("wgmma.mma_async"),
        "bulk_copies": ptx.count("cp.async.bulk.tensor"),
    }


if __name__ == "__main__":
    for target in sys.argv[1:]:
        capability, head_dim, dtype, *rest = target.split("-")
        print(json.dumps(compile_kernel(int(capability), int(head_dim), dtype, rest == ["rest"])))
