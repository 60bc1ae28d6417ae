"""Errors of anchor_local at full size, against float64 and beside those of eager bfloat16.

All heads, but not all rows: the first 64 anchors, and about 400 rows evenly from the last anchors to the end.
"""

from dataclasses import dataclass

from attention.choice import Precision
from benchmarks.attention_cases import FP8_ERROR, Shape, inputs, kernel_call, truth

ACCURACY_SHAPES = (
    Shape(32_760, 12, 128, 3120, 16),
    # A length, a block and a stride that divide nothing.
    Shape(200_001, 2, 128, 9_999, 17),
)


@dataclass(frozen=True, slots=True)
class AccuracyRow:
    """Relative errors of sampled rows; ``most`` is what this precision may have."""

    shape: Shape
    precision: Precision
    rows: int
    error: float
    eager_error: float
    most: float

    @property
    def passes(self) -> bool:
        """Whether the error is small enough; NaN is not."""
        return self.error <= self.most


def accuracy_rows(shapes: tuple[Shape, ...] = ACCURACY_SHAPES, device: str = "cuda") -> list[AccuracyRow]:
    """Both precisions at each shape: bfloat16 may err as much as eager bfloat16, fp8 as FP8_ERROR says."""
    rows = []
    for shape in shapes:
        x = inputs(shape, device)
        exact = truth(shape, x)
        for precision in ("full", "fp8"):
            error = exact.error(kernel_call(shape, x, precision)())
            most = FP8_ERROR if precision == "fp8" else exact.eager_error
            rows.append(AccuracyRow(shape, precision, exact.rows.numel(), error, exact.eager_error, most))
    return rows


def accuracy_table(rows: list[AccuracyRow]) -> str:
    """As Markdown."""
    lines = ["| shape, block, stride | precision | rows | error | eager bf16 | allowed |", "|---" * 6 + "|"]
    for row in rows:
        mark = "" if row.passes else " FAILED"
        lines.append(
            f"| {row.shape.title} | {row.precision} | {row.rows} | {row.error:.2e}{mark} | "
            f"{row.eager_error:.2e} | {row.most:.2e} |"
        )
    return "\n".join(lines)
