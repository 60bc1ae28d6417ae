"""window_sink on a GPU: error in both sink modes, time beside other kernels, and time against tokens.

    python -m benchmarks.window --json window.json
    python -m benchmarks.window --tune

Device time is that of a replayed CUDA graph which runs over several inputs, so that no call finds its tensors
in the cache; the time of a plain call from Python stands beside it. If an error is above that of the same
maths in eager bfloat16, nothing is written.
"""

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from attention.window_sink.api import window_sink_attention
from attention.window_sink.reference import allowed
from attention.window_sink.sinks import SinkMode
from attention.window_sink.triton_impl import TileConfig, window_sink_triton
from attention.window_sink.window import Window
from benchmarks.gpu import Timing, device_seconds, graph_seconds, machine

MODES: tuple[SinkMode, ...] = get_args(SinkMode)
INPUT_SETS = 4  # 67 MB each at 16,384 x 8 x 64: together several times the L2 cache


@dataclass(frozen=True, slots=True)
class Shape:
    """One sequence of bfloat16 and a window of ``side`` units to either side."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    side: int
    unit: int = 1
    global_keys: int = 0

    @property
    def window(self) -> Window:
        """Which keys a query sees."""
        return Window(self.side, self.side, self.unit, self.global_keys)

    @property
    def density(self) -> float:
        """Allowed pairs over all pairs."""
        return self.window.allowed_pairs(self.tokens) / self.tokens**2


# 21 latent frames of Wan 2.1 1.3B at 832x480, and of the 14B at 1280x720 with ten heads: two frames to
# either side, and the first one.
CLIP_SHAPES = (
    Shape(21 * 1560, 12, 12, 128, 2, unit=1560, global_keys=1560),
    Shape(21 * 3600, 10, 10, 128, 2, unit=3600, global_keys=3600),
)
PEER_SHAPES = (
    Shape(16_384, 8, 8, 64, 64),
    Shape(16_384, 32, 8, 64, 64),
    Shape(16_384, 8, 8, 128, 512),
    *CLIP_SHAPES,
)
LINEAR = tuple(Shape(2**power, 8, 8, 64, 64) for power in range(14, 19))
ERROR_SHAPES = (
    Shape(2_048, 8, 8, 64, 64),
    Shape(1_000, 32, 8, 64, 64),
    Shape(777, 4, 2, 72, 32),
    Shape(9 * 256, 8, 8, 128, 1, unit=256, global_keys=256),
)
TUNE_CONFIGS = tuple(
    TileConfig(m, n, warps, stages, fewest_inner)
    for (m, n), warps, stages, fewest_inner in itertools.product(
        ((64, 32), (64, 64), (128, 64), (64, 128), (128, 128)), (4, 8), (2, 3), (1, 2)
    )
)


@dataclass(frozen=True)
class Inputs:
    """Random tensors of one call."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens: Tensor
    sinks: Tensor


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """Relative errors against float64: the operator's, eager bfloat16's, and that of the other sink mode."""

    shape: Shape
    mode: SinkMode
    error: float
    eager_error: float
    other_mode_error: float


@dataclass(frozen=True, slots=True)
class PeerRow:
    """Device seconds of one kernel, and how far its result is from window_sink's without sinks."""

    shape: Shape
    name: str
    graph: Timing
    difference: float | None


@dataclass(frozen=True, slots=True)
class LinearRow:
    """Seconds at one length: on the device, called from Python, and of a copy that moves as many bytes."""

    tokens: int
    mode: SinkMode | None
    graph: Timing
    call: Timing
    copy: Timing


def inputs(shape: Shape, device: str, seed: int = 0) -> Inputs:
    """Bfloat16 q, k, v, the bounds of one sequence, and sinks as large as scores that matter."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(heads: int) -> Tensor:
        size = (shape.tokens, heads, shape.head_dim)
        return torch.randn(size, generator=generator, device=device).bfloat16()

    return Inputs(
        q=normal(shape.heads),
        k=normal(shape.kv_heads),
        v=normal(shape.kv_heads),
        cu_seqlens=torch.tensor([0, shape.tokens], dtype=torch.int32, device=device),
        sinks=2 + torch.randn(shape.heads, generator=generator, device=device),
    )


def attend(shape: Shape, x: Inputs, mode: SinkMode | None, **changed: Any) -> Tensor:
    """The operator; ``changed`` are its other arguments."""
    sinks = None if mode is None else x.sinks
    return window_sink_attention(
        x.q,
        x.k,
        x.v,
        x.cu_seqlens,
        window=(shape.side, shape.side),
        unit=shape.unit,
        global_keys=shape.global_keys,
        sinks=sinks,
        sink_mode=mode,
        **changed,
    )


def eager_bfloat16(shape: Shape, x: Inputs, mode: SinkMode) -> Tensor:
    """The same maths step by step in bfloat16, dense."""
    group = shape.heads // shape.kv_heads
    positions = torch.arange(shape.tokens, device=x.q.device)
    sinks = x.sinks.bfloat16()[:, None, None]
    scores = torch.einsum("qhd,khd->hqk", x.q, x.k.repeat_interleave(group, 1)) * shape.head_dim**-0.5
    if mode == "key0_bias":
        scores[:, :, :1] += sinks
    scores = scores.masked_fill(~allowed(shape.window, positions, positions), float("-inf"))
    if mode == "null_logit":
        scores = torch.cat([scores, sinks.expand(-1, shape.tokens, 1)], dim=2)
    weights = scores.softmax(-1)[:, :, : shape.tokens]
    return torch.einsum("hqk,khd->qhd", weights, x.v.repeat_interleave(group, 1))


def error_rows(shape: Shape, device: str) -> list[ErrorRow]:
    """Both modes on the same data. On a CPU it is the PyTorch implementation that is measured."""
    x = inputs(shape, device)
    wide = replace(x, q=x.q.double(), k=x.k.double(), v=x.v.double())
    rows = []
    for mode, other in itertools.permutations(MODES):
        exact = attend(shape, wide, mode, impl="reference")

        def relative(out: Tensor, exact: Tensor = exact) -> float:
            return float((out.double() - exact).norm() / exact.norm())

        rows.append(
            ErrorRow(
                shape=shape,
                mode=mode,
                error=relative(attend(shape, x, mode)),
                eager_error=relative(eager_bfloat16(shape, x, mode)),
                other_mode_error=relative(attend(shape, x, other)),
            )
        )
    return rows


def sdpa_with_mask(shape: Shape, device: str) -> Callable[[Inputs], Tensor]:
    """PyTorch's attention with a boolean tokens x tokens mask."""
    positions = torch.arange(shape.tokens, device=device)
    mask = allowed(shape.window, positions, positions)

    def call(x: Inputs) -> Tensor:
        # With enable_gqa and a mask no fused kernel is left, and scores of tokens x tokens would be stored.
        k, v = (part.repeat_interleave(shape.heads // shape.kv_heads, 1) for part in (x.k, x.v))
        q, k, v = (part.transpose(0, 1)[None] for part in (x.q, k, v))
        return scaled_dot_product_attention(q, k, v, attn_mask=mask)[0].transpose(0, 1)

    return call


def flex_with_window(shape: Shape, device: str, compiled: bool = True) -> Callable[[Inputs], Tensor]:
    """FlexAttention with the window as a block mask."""

    def in_window(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ((q // shape.unit - k // shape.unit).abs() <= shape.side) | (k < shape.global_keys)

    mask = create_block_mask(in_window, None, None, shape.tokens, shape.tokens, device=device)
    attention = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention

    def call(x: Inputs) -> Tensor:
        q, k, v = (part.transpose(0, 1)[None] for part in (x.q, x.k, x.v))
        out: Tensor = attention(q, k, v, block_mask=mask, enable_gqa=shape.heads != shape.kv_heads)
        return out[0].transpose(0, 1)

    return call


def dense_sdpa(shape: Shape, device: str) -> Callable[[Inputs], Tensor]:
    """PyTorch's fastest dense attention here, cuDNN's on Hopper: it sees more than the window."""

    def call(x: Inputs) -> Tensor:
        k, v = (part.repeat_interleave(shape.heads // shape.kv_heads, 1) for part in (x.k, x.v))
        q, k, v = (part.transpose(0, 1)[None] for part in (x.q, k, v))
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
            return scaled_dot_product_attention(q, k, v)[0].transpose(0, 1)

    return call


def flash_with_window(shape: Shape, device: str) -> Callable[[Inputs], Tensor]:
    """FlashAttention's own window."""
    flash = import_module("flash_attn").flash_attn_func

    def call(x: Inputs) -> Tensor:
        out: Tensor = flash(x.q[None], x.k[None], x.v[None], window_size=(shape.side, shape.side))
        return out[0]

    return call


def peers(shape: Shape) -> dict[str, Callable[[Shape, str], Callable[[Inputs], Tensor]]]:
    """Kernels to compare with that exist here and can do this window."""
    found: dict[str, Callable[[Shape, str], Callable[[Inputs], Tensor]]]
    found = {"SDPA with a mask": sdpa_with_mask, "FlexAttention": flex_with_window}
    if shape.unit == 1 and not shape.global_keys and find_spec("flash_attn") is not None:
        found["FlashAttention"] = flash_with_window
    return found


def peer_rows(shape: Shape) -> list[PeerRow]:
    """window_sink without and with sinks, then every peer, which have none."""
    sets = [inputs(shape, "cuda", seed) for seed in range(INPUT_SETS)]
    plain = attend(shape, sets[0], None).double()
    rows = []
    for mode in (None, *MODES):
        timing = graph_seconds([lambda x=x, m=mode: attend(shape, x, m) for x in sets])  # type: ignore[misc]
        rows.append(PeerRow(shape, f"window_sink, {mode or 'no sinks'}", timing, None))
    for name, build in peers(shape).items():
        call = build(shape, "cuda")
        difference = float((call(sets[0]).double() - plain).norm() / plain.norm())
        timing = graph_seconds([lambda x=x, c=call: c(x) for x in sets])  # type: ignore[misc]
        rows.append(PeerRow(shape, name, timing, difference))
    dense = dense_sdpa(shape, "cuda")
    timing = graph_seconds([lambda x=x: dense(x) for x in sets])  # type: ignore[misc]
    rows.append(PeerRow(shape, "dense SDPA, all keys", timing, None))
    return rows


def linear_row(shape: Shape, mode: SinkMode | None) -> LinearRow:
    """Time at one length."""
    sets = [inputs(shape, "cuda", seed) for seed in range(INPUT_SETS)]
    # q, k and v are read and the result written: as many bytes as a copy of half of them all.
    half = [torch.cat([x.q.flatten(), x.k.flatten()]) for x in sets]
    target = torch.empty_like(half[0])
    rotation = itertools.cycle(sets)
    return LinearRow(
        tokens=shape.tokens,
        mode=mode,
        graph=graph_seconds([lambda x=x: attend(shape, x, mode) for x in sets]),  # type: ignore[misc]
        call=device_seconds(lambda: attend(shape, next(rotation), mode)),
        copy=graph_seconds([lambda x=x: target.copy_(x) for x in half]),  # type: ignore[misc]
    )


def doubling_ratios(rows: Sequence[LinearRow]) -> list[float]:
    """Device time over that of the row before, whose tokens are half as many; 2 is a straight line."""
    return [
        row.graph.median_seconds / before.graph.median_seconds for before, row in itertools.pairwise(rows)
    ]


def tune(shape: Shape) -> list[tuple[TileConfig, float]]:
    """Seconds of every configuration that compiles and fits, fastest first."""
    sets = [inputs(shape, "cuda", seed) for seed in range(INPUT_SETS)]
    window, scale = shape.window, shape.head_dim**-0.5
    results = []
    for config in TUNE_CONFIGS:
        calls = [
            lambda x=x, c=config: window_sink_triton(x.q, x.k, x.v, x.cu_seqlens, window, scale, None, c)
            for x in sets
        ]
        try:
            timing = graph_seconds(calls)
        except Exception as error:  # Triton has no common base for "does not fit" and "does not compile"
            print(f"  {config}: {type(error).__name__}")
            continue
        results.append((config, timing.median_seconds))
    return sorted(results, key=lambda result: result[1])


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def shape_cell(shape: Shape) -> str:
    """Shape in words."""
    text = f"{shape.tokens:,} x {shape.heads}/{shape.kv_heads} x {shape.head_dim}, window {shape.side}"
    if shape.unit > 1:
        text += f" of {shape.unit}"
    return text + (f", {shape.global_keys} global" if shape.global_keys else "")


def error_table(rows: Sequence[ErrorRow]) -> str:
    """Errors of both modes, and of mistaking one for the other."""
    return table(
        ("tokens x heads x head_dim", "sinks", "error", "eager bf16", "the other mode", "times"),
        [
            (
                shape_cell(row.shape),
                row.mode,
                f"{row.error:.2e}",
                f"{row.eager_error:.2e}",
                f"{row.other_mode_error:.2e}",
                f"{row.other_mode_error / row.error:.0f}",
            )
            for row in rows
        ],
    )


def peer_table(rows: Sequence[PeerRow]) -> str:
    """Time beside other kernels."""
    return table(
        ("tokens x heads x head_dim", "density", "kernel", "time", "difference"),
        [
            (
                shape_cell(row.shape),
                f"{row.shape.density:.4f}",
                row.name,
                f"{row.graph.median_seconds * 1e3:.4f} ms",
                "" if row.difference is None else f"{row.difference:.1e}",
            )
            for row in rows
        ],
    )


def linear_table(rows: Sequence[LinearRow]) -> str:
    """Time against tokens."""
    ratios = ["", *(f"{ratio:.2f}" for ratio in doubling_ratios(rows))]
    return table(
        ("tokens", "sinks", "time", "of the time before", "called from Python", "times a copy"),
        [
            (
                f"{row.tokens:,}",
                row.mode or "none",
                f"{row.graph.median_seconds * 1e3:.4f} ms",
                ratio,
                f"{row.call.median_seconds * 1e3:.4f} ms",
                f"{row.graph.median_seconds / row.copy.median_seconds:.2f}",
            )
            for row, ratio in zip(rows, ratios, strict=True)
        ],
    )


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
        for shape in PEER_SHAPES:
            print(shape)
            for config, seconds in tune(shape):
                print(f"  {seconds * 1e3:8.4f} ms {config}", flush=True)
        return
    errors = [row for shape in ERROR_SHAPES for row in error_rows(shape, "cuda")]
    print(error_table(errors), flush=True)
    worse = [row for row in errors if not row.error <= row.eager_error]
    if worse:
        raise SystemExit(f"error above that of eager bfloat16: {worse}")
    linear = {mode or "none": [linear_row(shape, mode) for shape in LINEAR] for mode in (None, *MODES)}
    for mode_rows in linear.values():
        print(linear_table(mode_rows), flush=True)
    beside = [row for shape in PEER_SHAPES for row in peer_rows(shape)]
    print(peer_table(beside))
    if arguments.json:
        content = {
            "machine": machine(),
            "errors": [asdict(row) for row in errors],
            "linear": {mode: [asdict(row) for row in rows] for mode, rows in linear.items()},
            "doubling_ratios": {mode: doubling_ratios(rows) for mode, rows in linear.items()},
            "peers": [asdict(row) for row in beside],
        }
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
