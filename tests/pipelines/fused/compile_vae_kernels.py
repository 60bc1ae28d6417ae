"""Compiles the video decoder's kernels for GPUs that are not there and prints what they need, as JSON.

    python -m tests.pipelines.fused.compile_vae_kernels 90-96-fp32 89-1024-fp16

A target is capability-channels-type; each gives one line. A command of its own, since a process that
interprets kernels cannot compile them.
"""

import json
import re
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pipelines.fused import vae_kernels

PICTURES = ("x", "out", "other")
CHANNELS = ("gamma", "shift", "bias")
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "norm": (vae_kernels._norm_silu_kernel, {"shift": None, "bias": None}),
    "norm of a sum": (vae_kernels._norm_silu_kernel, {"bias": None}),
    "norm with bias": (vae_kernels._norm_silu_kernel, {}),
    "add": (vae_kernels._add_kernel, {}),
    "upsample": (vae_kernels._upsample_kernel, {"FRAMES": 2}),
}


def compile_case(capability: int, columns: int, dtype: str, case: str) -> dict[str, Any]:
    """Shared memory in bytes, and the widest load and store of pictures in the PTX in bits."""
    kernel, given = CASES[case]
    constants = {**given, "SCALE": columns**0.5, "COLUMNS": columns, **vae_kernels._sizes(columns)}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys((*PICTURES, *CHANNELS), f"*{dtype}")
    types |= {"eps": "fp32"} | dict.fromkeys(constants, "constexpr")
    types = {name: types[name] for name in kernel.arg_names}
    # What a launcher would find of pointers, and of strides, which channels divide.
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if types[name].startswith("*") or name.endswith("stride")
    }
    compiled = triton.compile(
        ASTSource(kernel, types, constants, aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": vae_kernels._WARPS},
    )
    return {
        "case": case,
        "shared_bytes": compiled.metadata.shared,
        **{f"{access}_bits": _widest(compiled.asm["ptx"], access) for access in ("ld", "st")},
    }


def _widest(ptx: str, access: str) -> int:
    found = re.findall(rf"{access}\.global(?:\.\w+)*?(?:\.v(\d))?\.b(\d+)", ptx)
    return max(int(count or 1) * int(bits) for count, bits in found)


if __name__ == "__main__":
    for target in sys.argv[1:]:
        capability, columns, dtype = target.split("-")
        print(json.dumps([compile_case(int(capability), int(columns), dtype, case) for case in CASES]))
