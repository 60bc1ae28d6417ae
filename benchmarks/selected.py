"""sparse_attn on a GPU: error, and time beside its floors and beside eager PyTorch.

    python -m benchmarks.selected --json selected.json
    python -m benchmarks.selected --tune       # tiles of the Triton kernel
    python -m benchmarks.selected --tune 4

The roofline of a shape is the larger of two floors, each measured here and now:

* memory: the time of a kernel that gathers the same rows by the same lists and adds them up, for each tile of
  heads as the Triton kernel does, and writes as many bytes; the fastest of several tile shapes is taken;
* arithmetic: the multiplications and additions of both products, over the rate of the fastest of some large
  bfloat16 products of PyTorch (cuBLAS).

A tile's floor is that of the kernel: 128 heads are two tiles, which gather twice. Device time is that of a
replayed CUDA graph over several inputs. The Triton kernel for all GPUs is timed beside what runs here. All
kernels are compiled beforehand, by several processes. If an error is above that of the same maths in eager
bfloat16, nothing is written.
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from attention.choice import Impl
from attention.selected.api import implementation, sparse_attn
from attention.selected.triton_impl import TileConfig, parts, sparse_attn_triton, tile_config
from benchmarks.compiling import compiling
from benchmarks.gpu import Timing, device_seconds, graph_seconds, machine

INPUT_SETS = 3
TARGET = 0.6  # of the roofline, at the first shape


@dataclass(frozen=True, slots=True)
class Shape:
    """Queries that each see the last ``window`` raw rows up to their own, and some compressed entries."""

    queries: int
    heads: int
    width: int
    window: int
    selected: int
    entries: int

    @property
    def listed(self) -> int:
        """Rows that a query lists."""
        return self.window + self.selected

    @property
    def operations(self) -> int:
        """Multiplications and additions of both products."""
        return 4 * self.queries * self.heads * self.listed * self.width


SHAPES = (
    Shape(4096, 64, 512, 128, 512, 1024),
    Shape(4096, 64, 512, 128, 512, 16_384),
    Shape(4096, 128, 512, 128, 1024, 16_384),
    Shape(4096, 64, 512, 128, 0, 0),
    Shape(4096, 128, 576, 0, 2048, 65_536),
    Shape(64, 64, 512, 128, 512, 16_384),
)
ERROR_QUERIES = 128
# Heads and keys of a tile, warps; 64 heads of 512 do not fit the registers of 4 warps.
TUNE_TILES = ((64, 16, 8), (64, 32, 8), (64, 64, 8), (64, 128, 8), (32, 32, 4), (32, 64, 4), (32, 64, 8))
TUNE_CONFIGS = tuple(
    TileConfig(heads, keys, warps, stages, split)
    for (heads, keys, warps), stages, split in itertools.product(TUNE_TILES, (2, 3, 4, 5), (False, True))
    if warps == 8 or not split
)
GatherTile = tuple[int, int, int]  # rows, warps, stages
GATHER_TILES: tuple[GatherTile, ...] = tuple(
    tile
    for tile in itertools.product((8, 16, 32, 64), (4, 8), (3, 5, 8))
    if tile[0] * tile[2] <= 256  # more rows at once do not fit shared memory
)
GATHERS_TIMED_AGAIN = 3
PRODUCT_SIZES = (4096, 8192)


@dataclass(frozen=True)
class Inputs:
    """Random tensors of one call."""

    q: Tensor
    kv: Tensor
    sink: Tensor
    topk_idxs: Tensor


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds at one shape, and its floors.

    ``implementation`` is what ran; ``portable`` is the Triton kernel for all GPUs.
    """

    shape: Shape
    implementation: str
    kernel: Timing
    portable: Timing
    memory_floor_seconds: float
    arithmetic_floor_seconds: float
    eager_seconds: float
    error: float
    eager_error: float

    @property
    def roofline_seconds(self) -> float:
        """The larger floor."""
        return max(self.memory_floor_seconds, self.arithmetic_floor_seconds)

    @property
    def share(self) -> float:
        """Of the roofline."""
        return self.roofline_seconds / self.kernel.median_seconds


def inputs(shape: Shape, device: str, seed: int = 0) -> Inputs:
    """Bfloat16; every query lists its window, then distinct entries in any order. All lists are full."""
    generator = torch.Generator(device).manual_seed(seed)
    raw = shape.queries + shape.window if shape.window else 0

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device).bfloat16()

    first = torch.arange(shape.queries, device=device)[:, None]
    lists = [first + torch.arange(shape.window, device=device)] if shape.window else []
    if shape.selected:
        chosen = torch.rand(shape.queries, shape.entries, generator=generator, device=device)
        lists.append(raw + chosen.topk(shape.selected).indices)
    return Inputs(
        q=normal(1, shape.queries, shape.heads, shape.width),
        kv=normal(1, raw + shape.entries, shape.width),
        sink=torch.randn(shape.heads, generator=generator, device=device),
        topk_idxs=torch.cat(lists, dim=1)[None].int(),
    )


def eager(x: Inputs) -> Tensor:
    """The same maths step by step in bfloat16, 256 queries at a time."""
    results = []
    for q, lists in zip(x.q[0].split(256), x.topk_idxs[0].split(256), strict=True):
        rows = x.kv[0][lists.long()]
        scores = q @ rows.mT * q.shape[2] ** -0.5
        sink = x.sink.to(scores.dtype)[:, None].expand(*scores.shape[:2], 1)
        results.append(torch.cat([scores, sink], dim=2).softmax(2)[..., :-1] @ rows)
    return torch.cat(results)[None]


def errors(shape: Shape, device: str) -> tuple[float, float]:
    """Relative errors of the operator and of eager bfloat16 against float64."""
    x = inputs(shape, device)
    exact = sparse_attn(x.q.double(), x.kv.double(), x.sink, x.topk_idxs, impl="torch")

    def relative(out: Tensor) -> float:
        return float((out.double() - exact).norm() / exact.norm())

    return relative(sparse_attn(x.q, x.kv, x.sink, x.topk_idxs)), relative(eager(x))


@triton.jit(do_not_specialize=["tiles"])  # type: ignore[untyped-decorator]
def _gather_kernel(  # type: ignore[no-untyped-def]
    kv, lists, out, tiles, listed,
    WIDTH: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The rows of a query's list, added up; written once for each head of a tile."""
    program = tl.program_id(0).to(tl.int64)
    lists += program // tiles * listed
    columns = tl.arange(0, MAIN)
    total = tl.zeros([MAIN], dtype=tl.float32)
    if REST:
        columns_rest = MAIN + tl.arange(0, REST)
        total_rest = tl.zeros([REST], dtype=tl.float32)
    for first in tl.range(0, listed, BLOCK_N, num_stages=STAGES):
        entries = first + tl.arange(0, BLOCK_N)
        index = tl.load(lists + entries, mask=entries < listed, other=0).to(tl.int64)
        rows = kv + index[:, None] * WIDTH
        main = tl.load(rows + columns[None, :], mask=(columns < WIDTH)[None, :], other=0.0)
        total += tl.sum(main.to(tl.float32), 0)
        if REST:
            rest = tl.load(rows + columns_rest[None, :], mask=(columns_rest < WIDTH)[None, :], other=0.0)
            total_rest += tl.sum(rest.to(tl.float32), 0)
    heads = program * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    spread = tl.zeros([BLOCK_H, MAIN], dtype=tl.float32) + total[None, :]
    tl.store(out + heads * WIDTH + columns[None, :], spread.to(tl.bfloat16), mask=(columns < WIDTH)[None, :])
    if REST:
        spread = tl.zeros([BLOCK_H, REST], dtype=tl.float32) + total_rest[None, :]
        mask = (columns_rest < WIDTH)[None, :]
        tl.store(out + heads * WIDTH + columns_rest[None, :], spread.to(tl.bfloat16), mask=mask)


def gather(x: Inputs, tile_heads: int, block_n: int, warps: int, stages: int) -> Tensor:
    """What the memory floor times: the sum of each query's rows, once for each head, bfloat16."""
    _, queries, heads, width = x.q.shape
    tiles = heads // tile_heads
    out = torch.empty_like(x.q)
    main, rest = parts(width)
    _gather_kernel[(queries * tiles,)](
        x.kv,
        x.topk_idxs,
        out,
        tiles,
        x.topk_idxs.shape[2],
        WIDTH=width,
        MAIN=main,
        REST=rest,
        BLOCK_H=tile_heads,
        BLOCK_N=block_n,
        STAGES=stages,
        num_warps=warps,
    )
    return out


def memory_floor(shape: Shape, sets: Sequence[Inputs]) -> float:
    """Seconds of the fastest gather, of those whose tiles fit the GPU; the fastest few are timed again."""
    heads = tile_heads(shape)
    calls = {tile: [partial(gather, x, heads, *tile) for x in sets] for tile in GATHER_TILES}
    first: dict[GatherTile, float] = {}
    for tile in calls:
        with suppress(OutOfResources):
            first[tile] = graph_seconds(calls[tile], repeats=3).median_seconds
    fastest = sorted(first, key=lambda tile: first[tile])[:GATHERS_TIMED_AGAIN]
    return min(graph_seconds(calls[tile]).median_seconds for tile in fastest)


def tile_heads(shape: Shape) -> int:
    """Heads that share what is gathered."""
    return tile_config(torch.bfloat16, shape.width, shape.heads, hopper=True).block_h


@dataclass(frozen=True, slots=True)
class Job:
    """Kernels to compile: an implementation, or a tile of the gather."""

    shape: Shape
    kernel: Impl | GatherTile


def jobs() -> list[Job]:
    """All that the measurements launch, what takes longest first. Lengths and heads compile nothing more."""
    shapes = {shape.width: shape for shape in SHAPES}.values()
    kernels: list[Impl | GatherTile] = ["auto", "triton", *GATHER_TILES]
    return [Job(shape, kernel) for kernel in kernels for shape in shapes]


def compile_job(job: Job, device: str = "cuda") -> None:
    """Run it on a few rows. Lists are as long as a multiple of 16, as those of all shapes are."""
    window = 16 if job.shape.window else 0
    x = inputs(replace(job.shape, queries=2, window=window, selected=16, entries=32), device)
    if isinstance(job.kernel, str):
        sparse_attn(x.q, x.kv, x.sink, x.topk_idxs, impl=job.kernel)
        return
    with suppress(OutOfResources):
        gather(x, tile_heads(job.shape), *job.kernel)


def product_rate() -> float:
    """Multiplications and additions in a second of the fastest large bfloat16 product."""
    rates = []
    for size in PRODUCT_SIZES:
        pairs = [torch.randn(2, size, size, device="cuda").bfloat16().unbind() for _ in range(INPUT_SETS)]
        timing = graph_seconds([lambda a=a, b=b: a @ b for a, b in pairs])  # type: ignore[misc]
        rates.append(2 * size**3 / timing.median_seconds)
    return max(rates)


def measure(shape: Shape, rate: float) -> Row:
    """One shape beside its floors and eager PyTorch."""
    sets = [inputs(shape, "cuda", seed) for seed in range(INPUT_SETS)]
    error, eager_error = errors(replace(shape, queries=min(shape.queries, ERROR_QUERIES)), "cuda")

    def seconds(impl: Impl) -> Timing:
        return graph_seconds([partial(sparse_attn, x.q, x.kv, x.sink, x.topk_idxs, impl=impl) for x in sets])

    return Row(
        shape=shape,
        implementation=implementation("auto", sets[0].q, sets[0].kv),
        kernel=seconds("auto"),
        portable=seconds("triton"),
        memory_floor_seconds=memory_floor(shape, sets),
        arithmetic_floor_seconds=shape.operations / rate,
        eager_seconds=device_seconds(lambda: eager(sets[0]), repeats=10).median_seconds,
        error=error,
        eager_error=eager_error,
    )


def tune(shape: Shape) -> list[tuple[TileConfig, float]]:
    """Seconds of every configuration that compiles and fits, fastest first."""
    sets = [inputs(shape, "cuda", seed) for seed in range(INPUT_SETS)]
    scale = shape.width**-0.5
    results = []
    for config in TUNE_CONFIGS:
        calls = [
            lambda x=x, c=config: sparse_attn_triton(x.q, x.kv, x.sink, x.topk_idxs, scale, c) for x in sets
        ]
        try:
            timing = graph_seconds(calls)
        except Exception as error:  # Triton has no common base for "does not fit" and "does not compile"
            print(f"  {config}: {type(error).__name__}")
            continue
        results.append((config, timing.median_seconds))
    return sorted(results, key=lambda result: result[1])


HEADER = (
    "queries x heads x width, window + selected of entries",
    "error (eager bf16)",
    "kernel",
    "TFLOP/s",
    "memory floor",
    "arithmetic floor",
    "of the roofline",
    "Triton",
    "eager",
    "times eager",
)


def line(row: Row) -> str:
    """One line of the Markdown table."""
    shape, seconds = row.shape, row.kernel.median_seconds
    cells = (
        f"{shape.queries:,} x {shape.heads} x {shape.width}, "
        f"{shape.window} + {shape.selected:,} of {shape.entries:,}",
        f"{row.error:.2e} ({row.eager_error:.2e})",
        f"{row.implementation} {seconds * 1e3:.3f} ms",
        f"{shape.operations / seconds / 1e12:.0f}",
        f"{row.memory_floor_seconds * 1e3:.3f} ms",
        f"{row.arithmetic_floor_seconds * 1e3:.3f} ms",
        f"{row.share:.2f}",
        f"{row.portable.median_seconds * 1e3:.3f} ms",
        f"{row.eager_seconds * 1e3:.2f} ms",
        f"{row.eager_seconds / seconds:.1f}",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument(
        "--tune",
        metavar="SHAPE",
        type=int,
        nargs="?",
        const=0,
        choices=range(len(SHAPES)),
        help="time tile configurations of this shape instead, by default the first (0)",
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    print(machine())
    if arguments.tune is not None:
        print(SHAPES[arguments.tune])
        for config, seconds in tune(SHAPES[arguments.tune]):
            print(f"  {seconds * 1e3:8.4f} ms {config}", flush=True)
        return
    with compiling(compile_job, jobs()):
        torch.zeros(1, device="cuda")  # this process starts its context meanwhile
    rate = product_rate()
    print(f"products: {rate / 1e12:.0f} TFLOP/s")
    print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}", flush=True)
    rows = []
    for shape in SHAPES:
        rows.append(measure(shape, rate))
        print(line(rows[-1]), flush=True)
    worse = [row for row in rows if not row.error <= row.eager_error]
    if worse:
        raise SystemExit(f"error above that of eager bfloat16: {worse}")
    print(f"{rows[0].share:.2f} of the roofline at the first shape; target {TARGET}")
    if arguments.json:
        content = {
            "machine": machine(),
            "product_operations_per_second": rate,
            "rows": [
                asdict(row) | {"roofline_seconds": row.roofline_seconds, "share": row.share} for row in rows
            ],
        }
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
