"""anchor_local on a GPU: error against float64, time against dense attention, FlexAttention and the ideal.

    python -m benchmarks.attention --json attention.json     # the table
    python -m benchmarks.attention --candidates              # kernels that might replace the shipped one
    python -m benchmarks.attention --accuracy                # errors at full size
    python -m benchmarks.attention --sweep --plot sweep.svg  # over lengths, strides and block sizes
    python -m benchmarks.attention --first-call              # what a first call costs
    python -m benchmarks.attention --tune                    # tiles of the Triton kernel

The kernel runs on tokens in the order that the swap keeps. Ideal is density x the fastest dense attention of
the same run. All calls of a row take turns in random order. If an error is larger than it may be (that of
eager bfloat16; 4e-2 for fp8), nothing is written.
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from attention.anchor_local.api import implementation
from attention.anchor_local.triton_impl import anchor_local_triton
from attention.choice import Precision
from attention.triton_tiles import TileConfig
from benchmarks.attention_accuracy import accuracy_rows, accuracy_table
from benchmarks.attention_candidates import candidate_rows, candidate_table
from benchmarks.attention_cases import FP8_ERROR, FP8_SHAPE, SHAPES, Inputs, Shape, inputs, kernel_call, truth
from benchmarks.attention_first_call import first_call_table, in_fresh_processes
from benchmarks.attention_peers import (
    DENSE_BACKENDS,
    FLEX_ORDERS,
    Call,
    dense_call,
    flex_call,
    in_order,
)
from benchmarks.attention_sweep import panels, sweep_rows, sweep_table
from benchmarks.gpu import Timing, device_seconds, interleaved_seconds, machine
from benchmarks.line_plot import svg

# Each costs two compilations by Inductor, and building a mask looks at all pairs: 1.1 GB at this length.
FLEX_SHAPES = (SHAPES[0], SHAPES[2])
TUNE_SHAPES = (
    Shape(32_760, 12, 128, 3120, 16),
    Shape(32_768, 24, 64, 4096, 16),
    Shape(16_384, 8, 256, 2048, 16),
)
TUNE_CONFIGS = tuple(
    TileConfig(m, n, warps, stages)
    for (m, n), warps, stages in itertools.product(((128, 128), (128, 64), (64, 128)), (4, 8), (2, 3, 4))
)


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured for a shape; errors are relative, against float64.

    ``implementation`` is what ran; ``portable`` is the Triton kernel for all GPUs.
    ``flex`` has the orders that were measured; ``flex_skipped`` says why one could not be.
    """

    shape: Shape
    precision: Precision
    implementation: str
    density: float
    error: float
    eager_error: float
    dense_backend: str
    dense: Timing
    every_dense: dict[str, Timing]
    sparse: Timing
    portable: Timing
    flex: dict[str, Timing]
    flex_skipped: dict[str, str]

    @property
    def most_error(self) -> float:
        """The most that the error may be."""
        return FP8_ERROR if self.precision == "fp8" else self.eager_error

    @property
    def of_ideal(self) -> float:
        """Ideal time over measured time; 1 is as good as dense attention per allowed pair."""
        return self.density * self.dense.median_seconds / self.sparse.median_seconds

    @property
    def speed_up(self) -> float:
        """Dense time over measured time."""
        return self.dense.median_seconds / self.sparse.median_seconds

    def over_flex(self, order: str) -> float | None:
        """FlexAttention's time over measured time."""
        timing = self.flex.get(order)
        return None if timing is None else timing.median_seconds / self.sparse.median_seconds


def measure(shape: Shape, precision: Precision = "full", rounds: int = 15) -> Row:
    """Check, then time, one shape."""
    x = inputs(shape)
    run = kernel_call(shape, x, precision)
    exact = truth(shape, x)
    error = exact.error(run())
    flex, skipped = _flex_calls(shape, x, exact.error, exact.eager_error)
    portable = kernel_call(shape, x, precision, "triton")
    calls = (
        {"sparse": run, "portable": portable} | {name: dense_call(x, name) for name in DENSE_BACKENDS} | flex
    )
    timings = interleaved_seconds(calls, rounds)
    dense_backend = min(DENSE_BACKENDS, key=lambda name: timings[name].median_seconds)
    torch.cuda.empty_cache()
    return Row(
        shape=shape,
        precision=precision,
        implementation=implementation("auto", x.q, precision),
        density=shape.density,
        error=error,
        eager_error=exact.eager_error,
        dense_backend=dense_backend,
        dense=timings[dense_backend],
        every_dense={name: timings[name] for name in DENSE_BACKENDS},
        sparse=timings["sparse"],
        portable=timings["portable"],
        flex={order: timings[order] for order in flex},
        flex_skipped=skipped,
    )


def _flex_calls(
    shape: Shape, x: Inputs, error_of: Any, most_error: float
) -> tuple[dict[str, Call], dict[str, str]]:
    """FlexAttention in each order, compiled and right; and why an order is missing."""
    if shape not in FLEX_SHAPES:
        return {}, {}
    found: dict[str, Call] = {}
    skipped: dict[str, str] = {}
    for order in FLEX_ORDERS:
        try:
            call = flex_call(shape, x, order)
            error = error_of(in_order(call(), x, order))
        except Exception as problem:  # Inductor has no common base for what cannot be compiled
            skipped[order] = f"{type(problem).__name__}: {problem}"[:200]
            continue
        if error <= most_error:
            found[order] = call
        else:
            skipped[order] = f"wrong: error {error:.2e}"
    return found, skipped


def tune(shape: Shape) -> list[tuple[TileConfig, float]]:
    """Seconds of every configuration that compiles and fits, fastest first."""
    x = inputs(shape)
    results = []
    for config in TUNE_CONFIGS:

        def call(config: TileConfig = config) -> object:
            return anchor_local_triton(x.q, x.k, x.v, x.layout, shape.scale, config)

        try:
            timing = device_seconds(call, repeats=15)
        except Exception as error:  # Triton has no common base for "does not fit" and "does not compile"
            print(f"  {config}: {type(error).__name__}")
            continue
        results.append((config, timing.median_seconds))
    return sorted(results, key=lambda result: result[1])


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    header = "tokens x heads x head_dim, block, stride; precision; density; error (eager bf16)"
    columns = f"{header}; dense; sparse; of ideal; x dense; Triton; Flex raster; Flex permuted".split("; ")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        over = [row.over_flex(order) for order in FLEX_ORDERS]
        cells = (
            row.shape.title,
            row.precision,
            f"{row.density:.4f}",
            f"{row.error:.2e} ({row.eager_error:.2e})",
            f"{row.dense_backend} {row.dense.median_seconds * 1e3:.2f} ms",
            f"{row.implementation} {row.sparse.median_seconds * 1e3:.3f} ms",
            f"{row.of_ideal:.3f}",
            f"{row.speed_up:.2f}",
            f"{row.portable.median_seconds / row.sparse.median_seconds:.2f} x ours",
            *("-" if times is None else f"{times:.2f} x ours" for times in over),
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        f"{row.shape.title}: Flex {order}: {reason}"
        for row in rows
        for order, reason in row.flex_skipped.items()
    ]
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--plot", type=Path, help="write the sweep's picture (SVG) here")
    parser.add_argument("--rounds", type=int, default=15, help="how often each call is timed")
    modes = parser.add_mutually_exclusive_group()
    for mode in ("candidates", "accuracy", "sweep", "first-call", "tune"):
        modes.add_argument(f"--{mode}", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    print(machine())
    if arguments.candidates:
        candidates = candidate_rows(arguments.rounds)
        print(candidate_table(candidates))
        _write(arguments.json, candidates)
    elif arguments.accuracy:
        accuracies = accuracy_rows()
        print(accuracy_table(accuracies))
        _refuse([row.shape for row in accuracies if not row.passes])
        _write(arguments.json, accuracies)
    elif arguments.sweep:
        points = sweep_rows(arguments.rounds)
        print(sweep_table(points))
        _write(arguments.json, points)
        if arguments.plot:
            arguments.plot.write_text(svg(panels(points)))
    elif arguments.first_call:
        firsts = in_fresh_processes()
        print(first_call_table(firsts))
        _write(arguments.json, firsts)
    elif arguments.tune:
        for shape in TUNE_SHAPES:
            print(shape)
            for config, seconds in tune(shape):
                print(f"  {seconds * 1e3:8.3f} ms {config}", flush=True)
    else:
        rows = [measure(shape, rounds=arguments.rounds) for shape in SHAPES]
        rows.append(measure(FP8_SHAPE, "fp8", arguments.rounds))
        print(table(rows))
        _write(arguments.json, rows)
        _refuse([row.shape for row in rows if not row.error <= row.most_error])


def _refuse(worse: list[Shape]) -> None:
    if worse:
        raise SystemExit(f"error above what is allowed at {worse}")


def _write(path: Path | None, rows: Sequence[Any]) -> None:
    """JSON of dataclass rows with what they derive."""
    if path is None:
        return
    derived = ("of_ideal", "speed_up")
    content = [
        {name: getattr(row, name) for name in derived if hasattr(row, name)} | asdict(row) for row in rows
    ]
    path.write_text(json.dumps({"machine": machine(), "rows": content}, indent=1) + "\n")


if __name__ == "__main__":
    main()
