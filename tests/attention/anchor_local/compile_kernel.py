"""Compiles the kernel for GPUs that are not there and prints what it needs, one JSON object a target.

    python -m tests.attention.anchor_local.compile_kernel 89-128-bf16 90-128-bf16

A command of its own, since a process that interprets kernels cannot compile them.
"""

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from attention.anchor_local import fp8_impl, hopper, triton_impl
from attention.hopper_tiles import GROUP_ROWS
from attention.triton_tiles import TileConfig

SOURCES = {"q_source": "block_m", "k_source": "block_n", "v_source": "block_n"}


def compile_kernel(capability: int, head_dim: int, dtype: str) -> dict[str, Any]:
    """Shared memory in bytes, and how often the PTX names Hopper's matrix and copy instructions."""
    columns = triton.next_power_of_2(head_dim)
    tables = {"fp32": triton_impl._FLOAT32}
    hopper = capability // 10 in (9, 10)
    config = tables.get(dtype, triton_impl._HOPPER if hopper else triton_impl._OTHER)[columns]
    tma = hopper and columns == head_dim
    constants = {
        "HEAD_DIM": head_dim,
        "COLUMNS": columns,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "TMA": tma,
        "INTERPRETED": False,
    }

    def type_of(name: str) -> str:
        if name in SOURCES:
            rows = getattr(config, SOURCES[name])
            return f"tensordesc<{dtype}[{rows},{head_dim}]>" if tma else f"*{dtype}"
        known = {"out": f"*{dtype}", "tiles": "*i32", "scale_log2": "fp32"}
        return "constexpr" if name in constants else known.get(name, "i32")

    kernel = triton_impl._anchor_local_kernel
    types = {name: type_of(name) for name in kernel.arg_names}
    return _needs(capability, ASTSource(kernel, types, constants), config)


def compile_fp8(capability: int, head_dim: int) -> dict[str, Any]:
    """The same of the fp8 kernel."""
    tma = capability // 10 in (9, 10)
    config = (fp8_impl._HOPPER if tma else fp8_impl._ADA)[head_dim]
    constants = {
        "HEAD_DIM": head_dim,
        "COLUMNS": head_dim,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "TMA": tma,
        "INTERPRETED": False,
    }
    tiles = {
        "q_source": ("i8", config.block_m, head_dim),
        "k_source": ("i8", config.block_n, head_dim),
        "v_source": ("fp8e4nv", head_dim, config.block_n),
    }

    def type_of(name: str) -> str:
        if name in tiles:
            dtype, rows, columns = tiles[name]
            return f"tensordesc<{dtype}[{rows},{columns}]>" if tma else f"*{dtype}"
        floats = dict.fromkeys(("q_scale", "k_scale", "v_scale"), "*fp32")
        known = floats | {"out": "*bf16", "tiles": "*i32", "scale_log2": "fp32"}
        return "constexpr" if name in constants else known.get(name, "i32")

    kernel = fp8_impl._fp8_kernel
    types = {name: type_of(name) for name in kernel.arg_names}
    return _needs(capability, ASTSource(kernel, types, constants), config)


def compile_hopper(head_dim: int, dtype: str) -> dict[str, Any]:
    """The same of Hopper's own kernel."""
    config = hopper.CONFIGS[head_dim]
    constants = {
        "HEAD_DIM": head_dim,
        "BLOCK_N": config.block_n,
        "STAGES": config.stages,
        "GROUPS": config.groups,
        "REGISTERS": config.registers,
        "OVERLAP": config.overlap,
    }
    element = {"bf16": gl.bfloat16, "fp16": gl.float16}[dtype]
    rows = {"q_desc": GROUP_ROWS, "k_desc": config.block_n, "v_desc": config.block_n}

    def type_of(name: str) -> str:
        if name in rows:
            tile = [rows[name], head_dim]
            layout = gl.NVMMASharedLayout.get_default_for(tile, element)
            return f"tensordesc<{dtype}[{tile[0]},{tile[1]}],{layout!r}>"
        known = {"out": f"*{dtype}", "items": "*i32", "starts": "*i32", "scale_log2": "fp32"}
        return "constexpr" if name in constants else known.get(name, "i32")

    types = {name: type_of(name) for name in hopper._kernel.arg_names}
    aligned = ("out", "items", "starts", "out_stride_row", "out_stride_head")
    attributes = {(types_index(types, name),): [["tt.divisibility", 16]] for name in aligned}
    source = GluonASTSource(hopper._kernel, types, constants, attributes)
    return _needs(90, source, TileConfig(0, 0, 4, 1))


def types_index(types: dict[str, str], name: str) -> int:
    """The argument's place."""
    return list(types).index(name)


def _needs(capability: int, source: Any, config: TileConfig) -> dict[str, Any]:
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": config.num_warps, "num_stages": config.num_stages},
    )
    ptx = compiled.asm["ptx"]
    return {
        "shared_bytes": compiled.metadata.shared,
        "wgmma": ptx.count("wgmma.mma_async"),
        "bulk_copies": ptx.count("cp.async.bulk.tensor"),
    }


if __name__ == "__main__":
    for target in sys.argv[1:]:
        capability, head_dim, dtype = target.split("-")
        if dtype.startswith("gluon"):
            print(json.dumps(compile_hopper(int(head_dim), dtype.removeprefix("gluon"))))
        elif dtype == "fp8":
            print(json.dumps(compile_fp8(int(capability), int(head_dim))))
        else:
            print(json.dumps(compile_kernel(int(capability), int(head_dim), dtype)))
