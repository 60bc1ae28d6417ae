"""anchor_local over lengths, strides and block sizes, beside its ideal; a JSON file and a picture.

Knows shapes. Does not know how pictures are drawn (benchmarks/line_plot.py).
"""

from dataclasses import dataclass, replace

import torch

from attention.choice import Precision
from benchmarks.attention_cases import Shape, inputs, kernel_call
from benchmarks.attention_peers import DENSE_BACKENDS, Call, dense_call
from benchmarks.gpu import interleaved_seconds
from benchmarks.line_plot import Line, Panel

BASE = Shape(32_760, 12, 128, 3120, 16)
LENGTHS = (4_096, 8_192, 16_384, 32_768, 65_536, 131_072, 200_000)
STRIDES = (4, 8, 16, 32, 64, 128)
BLOCK_SIZES = (390, 780, 1_560, 3_120, 6_240, 12_480)
SWEEPS: dict[str, tuple[Shape, ...]] = {
    "tokens": tuple(replace(BASE, tokens=tokens) for tokens in LENGTHS),
    "anchor stride": tuple(replace(BASE, anchor_stride=stride) for stride in STRIDES),
    "block size": tuple(replace(BASE, block_size=size) for size in BLOCK_SIZES),
}
_VALUE = {"tokens": "tokens", "anchor stride": "anchor_stride", "block size": "block_size"}


@dataclass(frozen=True, slots=True)
class SweepRow:
    """Median seconds at one point of one sweep; ideal is density x the fastest dense time."""

    sweep: str
    value: int
    density: float
    dense_seconds: float
    ideal_seconds: float
    full_seconds: float
    fp8_seconds: float

    @property
    def of_ideal(self) -> float:
        """Ideal over measured time, full precision."""
        return self.ideal_seconds / self.full_seconds


def sweep_rows(rounds: int = 7) -> list[SweepRow]:
    """Every point of every sweep."""
    return [_row(sweep, shape, rounds) for sweep, shapes in SWEEPS.items() for shape in shapes]


def _row(sweep: str, shape: Shape, rounds: int) -> SweepRow:
    x = inputs(shape)
    precisions: tuple[Precision, ...] = ("full", "fp8")
    calls: dict[str, Call] = {backend: dense_call(x, backend) for backend in DENSE_BACKENDS}
    for precision in precisions:
        calls[precision] = kernel_call(shape, x, precision)
    seconds = {name: timing.median_seconds for name, timing in interleaved_seconds(calls, rounds).items()}
    dense = min(seconds[backend] for backend in DENSE_BACKENDS)
    torch.cuda.empty_cache()
    value: int = getattr(shape, _VALUE[sweep])
    return SweepRow(
        sweep, value, shape.density, dense, shape.density * dense, seconds["full"], seconds["fp8"]
    )


def panels(rows: list[SweepRow]) -> list[Panel]:
    """One panel a sweep: milliseconds over its value, both logarithmic."""
    return [
        Panel(
            title=f"{sweep} ({BASE.title} otherwise)",
            x_label=sweep,
            y_label="ms",
            lines=[
                Line(name, [(row.value, getattr(row, field) * 1e3) for row in rows if row.sweep == sweep])
                for name, field in (
                    ("dense", "dense_seconds"),
                    ("ideal", "ideal_seconds"),
                    ("anchor_local", "full_seconds"),
                    ("anchor_local, fp8", "fp8_seconds"),
                )
            ],
        )
        for sweep in dict.fromkeys(row.sweep for row in rows)
    ]


def sweep_table(rows: list[SweepRow]) -> str:
    """As Markdown."""
    columns = ("sweep", "value", "density", "dense", "anchor_local", "of ideal", "fp8")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [
        f"| {row.sweep} | {row.value:,} | {row.density:.4f} | {row.dense_seconds * 1e3:.3f} ms | "
        f"{row.full_seconds * 1e3:.3f} ms | {row.of_ideal:.3f} | {row.fp8_seconds * 1e3:.3f} ms |"
        for row in rows
    ]
    return "\n".join(lines)
