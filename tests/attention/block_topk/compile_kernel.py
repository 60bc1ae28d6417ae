"""Compiles the kernels for GPUs that are not there and prints what they need, one JSON object a target.

    python -m tests.attention.block_topk.compile_kernel 89-128-bf16 90-128-bf16-rest

A target is capability-head_dim-dtype, with ``rest`` if boxes that are not kept take part; ``gluon`` before
the dtype means Hopper's own kernel. A command of its own, since a process that interprets kernels cannot
compile them.
"""

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from attention.block_topk import hopper, triton_impl, triton_selection
from attention.hopper_tiles import GROUP_ROWS

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


HOPPER_DESCRIPTORS = ("q_desc", "k_desc", "v_desc", "rest_k_desc", "rest_v_desc")
HOPPER_INT32 = ("items", "counter", "whole_lists", "partial_lists", "counts")


def hopper_source(head_dim: int, dtype: str, rest: bool) -> GluonASTSource:
    """Hopper's own kernel with the configuration for the head_dim."""
    config = hopper.CONFIGS[head_dim]
    constants = {
        "HEAD_DIM": head_dim,
        "BLOCK_N": config.block_n,
        "STAGES": config.stages,
        "GROUPS": config.groups,
        "REGISTERS": config.registers,
        "OVERLAP": config.overlap,
        "REST": rest,
    }
    element = {"bf16": gl.bfloat16, "fp16": gl.float16}[dtype]
    known = dict.fromkeys(HOPPER_INT32, "*i32") | {"out": f"*{dtype}", "rest_bias": "*fp32"}

    def type_of(name: str) -> str:
        if name in HOPPER_DESCRIPTORS:
            tile = [GROUP_ROWS if name == "q_desc" else config.block_n, head_dim]
            layout = gl.NVMMASharedLayout.get_default_for(tile, element)
            return f"tensordesc<{dtype}[{tile[0]},{tile[1]}],{layout!r}>"
        if name in constants:
            return "constexpr"
        return "fp32" if name == "scale_log2" else known.get(name, "i32")

    names = hopper._kernel.arg_names
    aligned = (*known, "out_stride_row", "out_stride_head")
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    return GluonASTSource(hopper._kernel, {name: type_of(name) for name in names}, constants, attributes)


def compile_hopper(head_dim: int, dtype: str, rest: bool) -> dict[str, Any]:
    """The same of Hopper's own kernel; its selection is that of the others."""
    source = hopper_source(head_dim, dtype, rest)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    ptx = compiled.asm["ptx"]
    return {
        "shared_bytes": compiled.metadata.shared,
        "shared_bytes_of_selection": 0,
        "wgmma": ptx.count("wgmma.mma_async"),
        "bulk_copies": ptx.count("cp.async.bulk.tensor"),
    }


if __name__ == "__main__":
    for target in sys.argv[1:]:
        capability, head_dim, dtype, *rest = target.split("-")
        if dtype.startswith("gluon"):
            dtype = dtype.removeprefix("gluon")
            print(json.dumps(compile_hopper(int(head_dim), dtype, rest == ["rest"])))
        else:
            print(json.dumps(compile_kernel(int(capability), int(head_dim), dtype, rest == ["rest"])))
