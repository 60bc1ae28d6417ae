"""anchor_local on a GPU: error against float64, and time against dense attention and the ideal.

    python -m benchmarks.attention --json attention.json
    python -m benchmarks.attention --tune

The kernel runs on tokens in the order that the swap keeps. Ideal is density x the fastest dense attention of
the same run. If the error against float64 is worse than that of eager bfloat16, nothing is written.
"""

import argparse
import itertools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attention.anchor_local.reference import allowed
from attention.anchor_local.triton_impl import anchor_local_triton
from attention.layout import anchor_local_layout
from attention.pattern import AnchorLocalPattern
from attention.triton_tiles import TileConfig
from benchmarks.gpu import Timing, device_seconds, machine


@dataclass(frozen=True, slots=True)
class Shape:
    """One row of the table."""

    tokens: int
    heads: int
    head_dim: int
    block_size: int
    anchor_stride: int

    @property
    def pattern(self) -> AnchorLocalPattern:
        """The pattern of this row."""
        return AnchorLocalPattern(self.block_size, self.anchor_stride)


SHAPES = (
    Shape(32_760, 12, 128, 3120, 16),
    Shape(32_760, 40, 128, 3120, 16),
    Shape(32_760, 40, 128, 1560, 32),
    Shape(75_600, 12, 128, 3600, 16),
    Shape(75_600, 40, 128, 7200, 32),
    Shape(75_600, 40, 128, 3600, 64),
    Shape(32_768, 24, 64, 4096, 16),
)
TUNE_SHAPES = (
    Shape(32_760, 12, 128, 3120, 16),
    Shape(32_768, 24, 64, 4096, 16),
    Shape(16_384, 8, 256, 2048, 16),
)
TUNE_CONFIGS = tuple(
    TileConfig(m, n, warps, stages)
    for (m, n), warps, stages in itertools.product(((128, 128), (128, 64), (64, 128)), (4, 8), (2, 3, 4))
)
DENSE_BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured for a shape; errors are relative, against float64."""

    shape: Shape
    density: float
    error: float
    eager_error: float
    dense_backend: str
    dense: Timing
    sparse: Timing

    @property
    def of_ideal(self) -> float:
        """Ideal time over measured time; 1 is as good as dense attention per allowed pair."""
        return self.density * self.dense.median_seconds / self.sparse.median_seconds

    @property
    def speed_up(self) -> float:
        """Dense time over measured time."""
        return self.dense.median_seconds / self.sparse.median_seconds


def ordered_inputs(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Random bfloat16 q, k, v [1, tokens, heads, head_dim]; the order is the layout's."""
    generator = torch.Generator("cuda").manual_seed(0)
    size = (1, shape.tokens, shape.heads, shape.head_dim)
    q, k, v = (torch.randn(size, generator=generator, device="cuda").bfloat16() for _ in range(3))
    return q, k, v


def errors(shape: Shape, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> tuple[float, float]:
    """Relative error of ``out`` and of eager bfloat16, on rows from all parts of the sequence."""
    layout = anchor_local_layout(shape.pattern, shape.tokens, q.device)
    rows = torch.cat([torch.arange(64), torch.arange(layout.anchors - 32, shape.tokens, shape.tokens // 400)])
    rows = rows.clamp(max=shape.tokens - 1).to(q.device)
    mask = allowed(shape.pattern, layout.key_order[rows], layout.key_order)

    def dense_rows(dtype: torch.dtype) -> Tensor:
        parts = []
        for head in range(shape.heads):
            scores = q[0, rows, head].to(dtype) @ k[0, :, head].to(dtype).T * shape.head_dim**-0.5
            weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
            parts.append(weights @ v[0, :, head].to(dtype))
        return torch.stack(parts, dim=1).double()

    exact = dense_rows(torch.float64)

    def relative(x: Tensor) -> float:
        return float((x - exact).norm() / exact.norm())

    return relative(out[0, rows].double()), relative(dense_rows(torch.bfloat16))


def fastest_dense(q: Tensor, k: Tensor, v: Tensor) -> tuple[str, Timing]:
    """The fastest dense attention that PyTorch has here."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))

    def timed(backend: SDPBackend) -> Timing:
        with sdpa_kernel(backend):
            return device_seconds(lambda: scaled_dot_product_attention(q, k, v))

    timings = {name: timed(backend) for name, backend in DENSE_BACKENDS.items()}
    best = min(timings, key=lambda name: timings[name].median_seconds)
    return best, timings[best]


def measure(shape: Shape) -> Row:
    """Check, then time, one shape."""
    q, k, v = ordered_inputs(shape)
    layout = anchor_local_layout(shape.pattern, shape.tokens, q.device)
    out = torch.full_like(q, float("nan"))
    run: Callable[[], Tensor] = lambda: anchor_local_triton(q, k, v, layout, shape.head_dim**-0.5, out=out)  # noqa: E731
    run()
    error, eager_error = errors(shape, q, k, v, out)
    dense_backend, dense = fastest_dense(q, k, v)
    return Row(
        shape=shape,
        density=shape.pattern.allowed_pairs(shape.tokens) / shape.tokens**2,
        error=error,
        eager_error=eager_error,
        dense_backend=dense_backend,
        dense=dense,
        sparse=device_seconds(run),
    )


def tune(shape: Shape) -> list[tuple[TileConfig, float]]:
    """Seconds of every configuration that compiles and fits, fastest first."""
    q, k, v = ordered_inputs(shape)
    layout = anchor_local_layout(shape.pattern, shape.tokens, q.device)
    results = []
    for config in TUNE_CONFIGS:
        try:
            timing = device_seconds(lambda c=config: anchor_local_triton(q, k, v, layout, 0.1, c), repeats=15)  # type: ignore[misc]
        except Exception as error:  # Triton has no common base for "does not fit" and "does not compile"
            print(f"  {config}: {type(error).__name__}")
            continue
        results.append((config, timing.median_seconds))
    return sorted(results, key=lambda result: result[1])


def print_table(rows: list[Row]) -> None:
    """The rows as a Markdown table."""
    header = "tokens x heads x head_dim, block stride, density, error (eager bf16)"
    columns = f"{header}, dense, sparse, of ideal, x dense".split(", ")
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    for row in rows:
        s = row.shape
        cells = (
            f"{s.tokens:,} x {s.heads} x {s.head_dim}",
            f"{s.block_size}, {s.anchor_stride}",
            f"{row.density:.4f}",
            f"{row.error:.2e} ({row.eager_error:.2e})",
            f"{row.dense_backend} {row.dense.median_seconds * 1e3:.2f} ms",
            f"{row.sparse.median_seconds * 1e3:.3f} ms",
            f"{row.of_ideal:.3f}",
            f"{row.speed_up:.2f}",
        )
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--tune", action="store_true", help="time tile configurations instead")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    print(machine())
    if arguments.tune:
        for shape in TUNE_SHAPES:
            print(shape)
            for config, seconds in tune(shape):
                print(f"  {seconds * 1e3:8.3f} ms {config}", flush=True)
        return
    rows = [measure(shape) for shape in SHAPES]
    print_table(rows)
    worse = [row.shape for row in rows if not row.error <= row.eager_error]
    if worse:
        raise SystemExit(f"error above that of eager bfloat16 at {worse}")
    if arguments.json:
        content = [asdict(row) | {"of_ideal": row.of_ideal, "speed_up": row.speed_up} for row in rows]
        arguments.json.write_text(json.dumps({"machine": machine(), "rows": content}, indent=1) + "\n")


if __name__ == "__main__":
    main()
