"""Times the kernels of benchmarks/kernels beside the shipped one and dense attention, all in one process.

Knows candidates. Does not know how anything is timed or printed elsewhere.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attention.anchor_local.fp8_impl import anchor_local_fp8, attend_quantized
from attention.anchor_local.quantizing import quantized
from attention.anchor_local.value_columns import value_columns
from attention.triton_tiles import TileConfig
from benchmarks.attention_cases import FP8_ERROR, FP8_SHAPE, SHAPES, Inputs, Shape, inputs, truth
from benchmarks.attention_peers import dense_call
from benchmarks.gpu import interleaved_seconds
from benchmarks.kernels.anchor_local import CANDIDATES, run

DENSE = "dense (cudnn)"
FP8_CONFIGS = {
    "64x128, 4 warps, 3 stages": TileConfig(64, 128, 4, 3),
    "64x128, 4 warps, 4 stages": TileConfig(64, 128, 4, 4),
    "128x128, 8 warps, 3 stages": TileConfig(128, 128, 8, 3),
    "128x128, 8 warps, 4 stages": TileConfig(128, 128, 8, 4),
    "128x64, 8 warps, 4 stages": TileConfig(128, 64, 8, 4),
}


@dataclass(frozen=True, slots=True)
class CandidateRow:
    """One candidate at one shape; ``problem`` instead of seconds if it does not run or is wrong."""

    shape: Shape
    name: str
    error: float | None
    median_seconds: float | None
    p10_seconds: float | None
    p90_seconds: float | None
    of_ideal: float | None
    problem: str | None = None


def candidate_rows(rounds: int) -> list[CandidateRow]:
    """All candidates at the shapes of the table, then the fp8 tiles."""
    rows = []
    for shape in SHAPES:
        x = inputs(shape)
        calls = {
            name: functools.partial(
                run, candidate, x.q, x.k, x.v, x.layout, shape.scale, torch.full_like(x.q, float("nan"))
            )
            for name, candidate in CANDIDATES[shape.head_dim].items()
        }
        rows += _timed(shape, x, calls, most_error=None, rounds=rounds)
        torch.cuda.empty_cache()
    x = inputs(FP8_SHAPE)
    return rows + _timed(FP8_SHAPE, x, _fp8_calls(FP8_SHAPE, x), most_error=FP8_ERROR, rounds=rounds)


def _fp8_calls(shape: Shape, x: Inputs) -> dict[str, Callable[[], Tensor]]:
    """With quantising, and of the default tiles without it too."""
    columns = value_columns(x.layout, x.q.device)
    narrow = quantized(x.q, x.k, x.v, columns)

    def ready(config: TileConfig) -> Callable[[], Tensor]:
        return lambda: attend_quantized(narrow, x.q, x.layout, shape.scale, config)

    def whole(config: TileConfig) -> Callable[[], Tensor]:
        return lambda: anchor_local_fp8(x.q, x.k, x.v, x.layout, shape.scale, config)

    def quantize() -> Tensor:
        return quantized(x.q, x.k, x.v, columns).q

    calls: dict[str, Callable[[], Tensor]] = {"quantising alone": quantize}
    for name, config in FP8_CONFIGS.items():
        calls[f"fp8, quantising included, {name}"] = whole(config)
        calls[f"fp8, {name}"] = ready(config)
    return calls


def _timed(
    shape: Shape,
    x: Inputs,
    calls: Mapping[str, Callable[[], Tensor]],
    most_error: float | None,
    rounds: int,
) -> list[CandidateRow]:
    exact = truth(shape, x)
    most_error = exact.eager_error if most_error is None else most_error
    rows: list[CandidateRow] = []
    right: dict[str, Callable[[], Tensor]] = {DENSE: dense_call(x, "cudnn")}
    errors: dict[str, float] = {}
    for name, call in calls.items():
        try:
            out = call()
            torch.cuda.synchronize()
        except Exception as problem:  # Triton has no common base for "does not fit" and "does not compile"
            rows.append(_bad(shape, name, f"{type(problem).__name__}: {problem}"[:200]))
            continue
        if out.dtype != x.q.dtype:  # quantising alone
            right[name] = call
        elif (error := exact.error(out)) <= most_error:
            right[name], errors[name] = call, error
        else:
            rows.append(_bad(shape, name, f"wrong: error {error:.2e}"))
    timings = interleaved_seconds(right, rounds)
    ideal = shape.density * timings[DENSE].median_seconds
    return [
        CandidateRow(
            shape,
            name,
            errors.get(name),
            timing.median_seconds,
            timing.p10_seconds,
            timing.p90_seconds,
            ideal / timing.median_seconds,
        )
        for name, timing in timings.items()
    ] + rows


def _bad(shape: Shape, name: str, problem: str) -> CandidateRow:
    return CandidateRow(shape, name, None, None, None, None, None, problem)


def candidate_table(rows: list[CandidateRow]) -> str:
    """The rows as text, fastest first within a shape; ideal is density x dense time of the same rounds."""
    lines = []
    for shape in dict.fromkeys(row.shape for row in rows):
        lines.append(f"{shape.title}, density {shape.density:.4f}")
        of_shape = [row for row in rows if row.shape == shape]
        for row in sorted(of_shape, key=lambda row: row.median_seconds or float("inf")):
            if row.median_seconds is None or row.p10_seconds is None or row.p90_seconds is None:
                lines.append(f"  {'-':>10}            {row.name}: {row.problem}")
                continue
            spread = (row.p90_seconds - row.p10_seconds) / row.median_seconds
            lines.append(
                f"  {row.median_seconds * 1e3:9.3f} ms {row.of_ideal:6.3f} of ideal, spread {spread:5.1%}  "
                f"{row.name}" + ("" if row.error is None else f" (error {row.error:.2e})")
            )
    return "\n".join(lines)
