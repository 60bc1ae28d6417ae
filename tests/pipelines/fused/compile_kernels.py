"""Compiles the kernels for GPUs that are not there and prints what they need, one JSON object a target.

    python -m tests.pipelines.fused.compile_kernels 90-1536 90-5120

A target is capability-channels. A command of its own, since a process that interprets kernels cannot compile
them.
"""

import json
import re
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pipelines.fused import kernels

TYPES = {
    **dict.fromkeys(("weight", "bias", "table", "cos", "sin"), "*fp32"),
    **dict.fromkeys(("x", "hidden", "summed", "normed", "q", "k", "q_weight", "k_weight"), "*bf16"),
    "modulation": "*fp32",
    "scales": "*fp32",
    "eps": "fp32",
}
NORM = {"GATE": -1, "SHIFT": 0, "hidden": None, "summed": None, "weight": None, "bias": None, "table": None}
FIRST_WITH_FP8 = 89
ADD = {"GATE": 2, "SHIFT": -1, "table": None}
STORED = {"scales": None}  # in the dtype of the hidden states; otherwise in e4m3
MODULATED = {**ADD, "SHIFT": 3, "weight": None, "bias": None}
ROTATE = {"HEAD_DIM": 128, "TABLE_STEP": 1}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "norm": (kernels._add_norm_kernel, {**NORM, **STORED}),
    "add, affine norm": (kernels._add_norm_kernel, {**ADD, **STORED}),
    "add, norm, modulation": (kernels._add_norm_kernel, {**MODULATED, **STORED}),
    "add": (kernels._add_norm_kernel, {**ADD, **STORED, "normed": None, "weight": None, "bias": None}),
    "norm in fp8": (kernels._add_norm_kernel, NORM),
    "add, affine norm in fp8": (kernels._add_norm_kernel, ADD),
    "add, norm, modulation in fp8": (kernels._add_norm_kernel, MODULATED),
    "rms norm, rotary": (kernels._rms_norm_kernel, ROTATE),
    "rms norm, rotary, wide tables": (kernels._rms_norm_kernel, {**ROTATE, "TABLE_STEP": 2}),
    "rms norm": (
        kernels._rms_norm_kernel,
        {**ROTATE, **dict.fromkeys(("k", "k_weight", "cos", "sin"))},
    ),
}


def compile_case(capability: int, columns: int, kernel: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Registers of a thread, shared memory in bytes, and the widths of loads and stores in the PTX."""
    sizes = kernels._sizes(columns, quantises="scales" in kernel.arg_names and "scales" not in given)
    warps = sizes.pop("num_warps")
    constants = {**given, "OF_TOKENS": False, "COLUMNS": columns, **sizes}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types = {name: "constexpr" if name in constants else TYPES.get(name, "i32") for name in kernel.arg_names}
    if types.get("scales") != "constexpr" and "normed" in types:
        types["normed"] = "*fp8e4nv"
    # What a launcher would find: pointers and strides divide by 16.
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if types[name] not in ("constexpr", "fp32")
    }
    compiled = triton.compile(
        ASTSource(kernel, types, constants, aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps},
    )
    found = re.findall(r"(?:ld|st)\.global[.\w:]*", compiled.asm["ptx"])
    widths: dict[str, int] = {}
    for each in found:
        widths[each] = widths.get(each, 0) + 1
    return {"shared_bytes": compiled.metadata.shared, "accesses": widths}


if __name__ == "__main__":
    for target in sys.argv[1:]:
        capability, columns = map(int, target.split("-"))
        for name, (kernel, given) in CASES.items():
            if capability < FIRST_WITH_FP8 and name.endswith("in fp8"):
                continue
            print(json.dumps({"case": name, **compile_case(capability, columns, kernel, given)}))
