"""block_topk on a GPU: error against float64, and time of its parts against dense attention and the ideal.

    python -m benchmarks.block_topk --json block_topk.json
    python -m benchmarks.block_topk --kernel triton   # the kernel for all GPUs, on Hopper too
    python -m benchmarks.block_topk --tune            # tiles of that kernel

Tokens lie in the order that the swap keeps. Ideal is the density that was counted x the fastest dense
attention of the same run. Selection alone is means, scores and lists; attention alone runs on lists that are
there already. Shapes that differ in their boxes only take turns with one dense attention. All kernels are
compiled beforehand, by several processes. If the error against float64 is worse than that of eager bfloat16,
nothing is written.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attention.block_topk import hopper, triton_impl
from attention.block_topk.api import implementation, kernel
from attention.block_topk.boxes import BoxPattern
from attention.block_topk.layout import BoxLayout, box_layout
from attention.block_topk.selection import box_scores, kept_counts, selected_boxes
from attention.block_topk.triton_selection import box_means_triton
from attention.choice import Impl
from attention.tiles import Grid
from benchmarks.compiling import compiling
from benchmarks.gpu import Timing, device_seconds, graph_seconds, interleaved_seconds, machine

ERROR_ROWS = 256
ROUNDS = 9
DENSE = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


@dataclass(frozen=True, slots=True)
class Shape:
    """One row of the table."""

    grid: Grid
    heads: int
    head_dim: int
    tile_thw: Grid
    top_k: float = 0.2
    pooled_rest: bool = False
    anchor_stride: int | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the clip."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def scale(self) -> float:
        """The default one."""
        return float(self.head_dim**-0.5)

    def layout(self, device: torch.device) -> BoxLayout:
        """The order of its tokens."""
        return box_layout(BoxPattern(self.tile_thw, anchor_stride=self.anchor_stride), self.grid, device)


SMALL, LARGE = (21, 30, 52), (21, 45, 80)
SHAPES = (
    Shape(SMALL, 12, 128, (21, 6, 4)),
    Shape(SMALL, 12, 128, (7, 15, 13)),
    Shape(SMALL, 12, 128, (7, 8, 9)),  # what auto takes
    Shape(SMALL, 12, 128, (21, 6, 4), pooled_rest=True),
    Shape(SMALL, 12, 128, (21, 6, 4), top_k=0.15, anchor_stride=16),
    Shape(SMALL, 40, 128, (21, 6, 4)),
    Shape(LARGE, 12, 128, (7, 9, 16)),
    Shape(LARGE, 40, 128, (7, 9, 16)),
    Shape(LARGE, 40, 128, (7, 9, 8)),
    Shape(LARGE, 40, 128, (7, 9, 8), pooled_rest=True),
    Shape(LARGE, 40, 128, (7, 9, 8), top_k=0.1),
)
TUNE_SHAPES = (
    Shape(SMALL, 12, 128, (21, 6, 4)),
    Shape(SMALL, 12, 128, (7, 8, 9)),
    Shape(SMALL, 12, 128, (7, 8, 9), pooled_rest=True),
    Shape(LARGE, 12, 128, (7, 9, 8)),
    Shape(SMALL, 24, 64, (21, 6, 4)),
    Shape(SMALL, 6, 256, (21, 6, 4)),
)
TUNE_CONFIGS = tuple(
    triton_impl.BoxTileConfig(m, n, warps, stages)
    for (m, n), warps, stages in product(((128, 128), (128, 64), (64, 128), (64, 64)), (4, 8), (2, 3, 4))
)


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured for a shape; errors are relative, against float64."""

    shape: Shape
    kernel: str
    boxes: int
    density: float
    error: float
    eager_error: float
    dense_backend: str
    dense: Timing
    both: Timing
    both_in_a_graph: Timing
    selection: Timing
    attention: Timing

    @property
    def of_ideal(self) -> float:
        """Ideal time over that of selection and attention; 1 is as good as dense attention per pair."""
        return self.density * self.dense.median_seconds / self.both.median_seconds

    @property
    def attention_of_ideal(self) -> float:
        """The same without the selection."""
        return self.density * self.dense.median_seconds / self.attention.median_seconds


def ordered_inputs(shape: Shape, device: str = "cuda") -> tuple[Tensor, Tensor, Tensor]:
    """Random bfloat16 q, k, v [1, tokens, heads, head_dim]; the order is the layout's."""
    generator = torch.Generator(device).manual_seed(0)
    size = (1, shape.tokens, shape.heads, shape.head_dim)
    q, k, v = (torch.randn(size, generator=generator, device=device).bfloat16() for _ in range(3))
    return q, k, v


def errors(
    shape: Shape, layout: BoxLayout, q: Tensor, k: Tensor, v: Tensor, out: Tensor
) -> tuple[float, float]:
    """Relative error of ``out`` and of eager bfloat16, on rows from all parts, for the kept boxes."""
    rows = torch.linspace(0, shape.tokens - 1, ERROR_ROWS, device=q.device).long()
    bounds = layout.bounds.long()
    box = (
        torch.bucketize(torch.arange(shape.tokens, device=q.device), bounds, right=True) - 1
    )  # -1: an anchor
    means = [box_means_triton(x, layout) for x in (q, k, v)]
    scores = box_scores(means[0], means[1], shape.scale)
    selected = selected_boxes(scores, layout.always, kept_counts(layout, shape.top_k)[0])[0]
    exact_keys = box < 0

    def dense_rows(dtype: torch.dtype) -> Tensor:
        parts = []
        for head in range(shape.heads):
            of_rows = selected[head][box[rows].clamp(min=0)]
            seen = of_rows[:, box.clamp(min=0)] | exact_keys | exact_keys[rows][:, None]
            logits = (q[0, rows, head].to(dtype) @ k[0, :, head].to(dtype).T * shape.scale).masked_fill(
                ~seen, float("-inf")
            )
            values = v[0, :, head].to(dtype)
            if shape.pooled_rest:
                rest = q[0, rows, head].to(dtype) @ means[1][0, head].to(dtype).T * shape.scale
                rest = rest + bounds.diff().to(dtype).log()
                rest = rest.masked_fill(of_rows | exact_keys[rows][:, None], float("-inf"))
                logits = torch.cat([logits, rest], dim=1)
                values = torch.cat([values, means[2][0, head].to(dtype)])
            parts.append(logits.softmax(-1) @ values)
        return torch.stack(parts, dim=1).double()

    truth = dense_rows(torch.float64)

    def relative(x: Tensor) -> float:
        return float((x - truth).norm() / truth.norm())

    return relative(out[0, rows].double()), relative(dense_rows(torch.bfloat16))


def counted_density(shape: Shape, layout: BoxLayout, tally: Tensor) -> float:
    """Of the pairs that kernels counted, and those with anchors."""
    first, tokens = layout.first, shape.tokens
    return (int(tally) / shape.heads + first * tokens + (tokens - first) * first) / tokens**2


@dataclass(frozen=True, slots=True)
class Checked:
    """A shape whose result was compared, and its calls: both parts, selection, attention."""

    shape: Shape
    kernel: str
    boxes: int
    density: float
    error: float
    eager_error: float
    calls: dict[str, Callable[[], object]]


def attention_alone(name: str, q: Tensor) -> tuple[Callable[..., Tensor], int]:
    """Of ``triton`` or ``gluon``: the kernel that walks lists, and the keys of a tile that they must have."""
    if name == "gluon":
        config = hopper.CONFIGS[q.shape[3]]
        return partial(hopper.attend, config=config), config.block_n
    tiles = triton_impl.tile_config(q)
    return partial(triton_impl.attend, config=tiles), tiles.block_n


def check(shape: Shape, q: Tensor, k: Tensor, v: Tensor, out: Tensor, impl: Impl) -> Checked:
    """Run one shape and compare; ``out`` is overwritten, now and by its calls."""
    layout = shape.layout(q.device)
    name = implementation(impl, q)
    run = kernel(name)
    attend_lists, block_n = attention_alone(name, q)
    out.fill_(float("nan"))
    tally = torch.zeros((), dtype=torch.int64, device=q.device)
    settings: dict[str, Any] = {
        "top_k": shape.top_k,
        "pooled_rest": shape.pooled_rest,
        "scale": shape.scale,
    }

    def both() -> Tensor:
        return run(q, k, v, layout, tally=tally, out=out, **settings)

    def select() -> object:
        return triton_impl.select(q, k, v, layout, tally=tally, block_n=block_n, **settings)

    both()
    density = counted_density(shape, layout, tally)
    error, eager_error = errors(shape, layout, q, k, v, out)
    lists, rest = triton_impl.select(q, k, v, layout, tally=None, block_n=block_n, **settings)

    def attend() -> Tensor:
        return attend_lists(q, k, v, layout, lists, rest, scale=shape.scale, out=out)

    calls: dict[str, Callable[[], object]] = {"both": both, "selection": select, "attention": attend}
    return Checked(shape, name, layout.boxes, density, error, eager_error, calls)


def measure(shapes: Sequence[Shape], dense_backend: str, impl: Impl) -> list[Row]:
    """Check, then time, shapes that differ in their boxes only: all take turns with one dense attention."""
    q, k, v = ordered_inputs(shapes[0])
    out = torch.empty_like(q)
    checked = [check(shape, q, k, v, out, impl) for shape in shapes]
    calls = {f"{name} {i}": call for i, one in enumerate(checked) for name, call in one.calls.items()}
    timings = interleaved_seconds(calls | {"dense": dense_call(dense_backend, q, k, v)}, ROUNDS)
    return [
        Row(
            shape=one.shape,
            kernel=one.kernel,
            boxes=one.boxes,
            density=one.density,
            error=one.error,
            eager_error=one.eager_error,
            dense_backend=dense_backend,
            dense=timings["dense"],
            both_in_a_graph=graph_seconds([one.calls["both"]], ROUNDS),
            both=timings[f"both {i}"],
            selection=timings[f"selection {i}"],
            attention=timings[f"attention {i}"],
        )
        for i, one in enumerate(checked)
    ]


def groups(shapes: Sequence[Shape]) -> list[list[Shape]]:
    """Those of the same grid, heads and head_dim together."""
    found: dict[tuple[Grid, int, int], list[Shape]] = {}
    for shape in shapes:
        found.setdefault((shape.grid, shape.heads, shape.head_dim), []).append(shape)
    return list(found.values())


def fastest_dense(shape: Shape) -> str:
    """The fastest of PyTorch's dense attentions."""
    q, k, v = ordered_inputs(shape)
    timings = interleaved_seconds({name: dense_call(name, q, k, v) for name in DENSE}, rounds=2)
    return min(DENSE, key=lambda name: timings[name].median_seconds)


def compile_shape(shape: Shape, impl: Impl, device: str = "cuda") -> None:
    """All that the measurement of a shape launches, with one head: how many compiles nothing more."""
    one = replace(shape, heads=1)
    q, k, v = ordered_inputs(one, device)
    check(one, q, k, v, torch.empty_like(q), impl).calls["attention"]()


def dense_call(name: str, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], object]:
    """One of PyTorch's dense attentions."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))

    def call() -> Tensor:
        with sdpa_kernel(DENSE[name]):
            return scaled_dot_product_attention(q, k, v)

    return call


def tune(
    shape: Shape, configs: Sequence[triton_impl.BoxTileConfig]
) -> list[tuple[triton_impl.BoxTileConfig, float]]:
    """Seconds of every configuration that compiles and fits, fastest first; selection included."""
    q, k, v = ordered_inputs(shape)
    layout = shape.layout(q.device)
    results = []
    for config in configs:

        def run(config: triton_impl.BoxTileConfig = config) -> Tensor:
            return triton_impl.block_topk_triton(
                q,
                k,
                v,
                layout,
                top_k=shape.top_k,
                pooled_rest=shape.pooled_rest,
                scale=shape.scale,
                tally=None,
                config=config,
            )

        try:
            timing = device_seconds(run, repeats=15)
        except Exception as error:  # Triton has no common base for "does not fit" and "does not compile"
            print(f"  {config}: {type(error).__name__}")
            continue
        results.append((config, timing.median_seconds))
    return sorted(results, key=lambda result: result[1])


def print_header() -> None:
    """Of the Markdown table."""
    header = "grid x heads x head_dim, box, top_k, rest, stride, boxes, density, error (eager bf16), dense"
    columns = f"{header}, selection, attention, both, in a graph, attention of ideal, of ideal".split(", ")
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|", flush=True)


def print_rows(rows: Sequence[Row]) -> None:
    """Lines of it."""
    for row in rows:
        s = row.shape
        cells = (
            f"{'x'.join(map(str, s.grid))} x {s.heads} x {s.head_dim}",
            "x".join(map(str, s.tile_thw)),
            f"{s.top_k:g}",
            str(s.pooled_rest),
            str(s.anchor_stride),
            str(row.boxes),
            f"{row.density:.4f}",
            f"{row.error:.2e} ({row.eager_error:.2e})",
            f"{row.dense_backend} {row.dense.median_seconds * 1e3:.2f} ms",
            f"{row.selection.median_seconds * 1e3:.3f} ms",
            f"{row.attention.median_seconds * 1e3:.3f} ms",
            f"{row.both.median_seconds * 1e3:.3f} ms",
            f"{row.both_in_a_graph.median_seconds * 1e3:.3f} ms",
            f"{row.attention_of_ideal:.3f}",
            f"{row.of_ideal:.3f}",
        )
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument(
        "--tune", action="store_true", help="time the Triton kernel's tiles, and ways to walk lists, instead"
    )
    parser.add_argument(
        "--kernel",
        choices=("auto", "triton"),
        default="auto",
        help="auto (the default) takes Hopper's own there; triton is the one for all GPUs",
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    print(machine())
    if arguments.tune:
        for shape in TUNE_SHAPES:
            print(shape)
            tiles = tune(shape, TUNE_CONFIGS)
            best = tiles[0][0]
            walks = [replace(best, read_ahead=a, edge_stages=s) for a, s in product((True, False), (1, 2, 3))]
            for config, seconds in tiles + tune(shape, walks):
                print(f"  {seconds * 1e3:8.3f} ms {config}", flush=True)
        return
    with compiling(partial(compile_shape, impl=arguments.kernel), SHAPES):
        fastest = [fastest_dense(group[0]) for group in groups(SHAPES)]
    print_header()
    rows = []
    for group, dense_backend in zip(groups(SHAPES), fastest, strict=True):
        measured = measure(group, dense_backend, arguments.kernel)
        print_rows(measured)
        rows.extend(measured)
    worse = [row.shape for row in rows if not row.error <= row.eager_error]
    if worse:
        raise SystemExit(f"error above that of eager bfloat16 at {worse}")
    if arguments.json:
        content = [
            asdict(row) | {"of_ideal": row.of_ideal, "attention_of_ideal": row.attention_of_ideal}
            for row in rows
        ]
        arguments.json.write_text(json.dumps({"machine": machine(), "rows": content}, indent=1) + "\n")


if __name__ == "__main__":
    main()
