"""anchor_local on a CPU against PyTorch's dense attention, at the bundled model's size.

    python -m benchmarks.attention_cpu --json benchmarks/results/attention_cpu.json

The calls alternate, so that both meet the same load of the machine.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention import AnchorLocalPattern, anchor_local_layout, anchor_local_ordered
from benchmarks.host import this_host
from configs.model_preset import BUNDLED_MODEL, find_model

HEADS, HEAD_DIM = 4, 64


@dataclass(frozen=True, slots=True)
class Row:
    """Median seconds of one call."""

    dtype: str
    tokens: int
    block_size: int
    anchor_stride: int
    density: float
    dense_seconds: float
    sparse_seconds: float


def alternate(calls: list[Callable[[], Tensor]], repeats: int) -> list[float]:
    """Median seconds of each call, made in turn."""
    seconds: list[list[float]] = [[] for _ in calls]
    for repeat in range(repeats + 2):
        for call, kept in zip(calls, seconds, strict=True):
            start = time.perf_counter()
            call()
            if repeat >= 2:  # the first two warm up
                kept.append(time.perf_counter() - start)
    return [statistics.median(kept) for kept in seconds]


def measure(dtype: torch.dtype, repeats: int) -> Row:
    """Dense and sparse attention of one layer of the bundled model, with its default pattern."""
    preset = find_model(BUNDLED_MODEL)
    defaults = preset.defaults
    grid = preset.geometry.token_grid(defaults.width, defaults.height, defaults.num_frames)
    setting = preset.attention.resolved(grid)
    pattern = AnchorLocalPattern(int(setting.block_size), int(setting.anchor_stride), setting.anchor_offset)
    tokens = grid[0] * grid[1] * grid[2]
    q, k, v = (torch.randn(1, tokens, HEADS, HEAD_DIM).to(dtype) for _ in range(3))
    layout = anchor_local_layout(pattern, tokens, q.device)
    dense, sparse = alternate(
        [
            lambda: scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)),
            lambda: anchor_local_ordered(q, k, v, layout),
        ],
        repeats,
    )
    density = pattern.allowed_pairs(tokens) / tokens**2
    return Row(str(dtype), tokens, pattern.block_size, pattern.anchor_stride, density, dense, sparse)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    rows = [measure(dtype, arguments.repeats) for dtype in (torch.float32, torch.bfloat16)]
    print("| dtype | tokens | block, stride | density | dense SDPA | anchor_local | ratio |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row.dtype} | {row.tokens} | {row.block_size}, {row.anchor_stride} | {row.density:.3f} "
            f"| {row.dense_seconds * 1e3:.1f} ms | {row.sparse_seconds * 1e3:.1f} ms "
            f"| {row.sparse_seconds / row.dense_seconds:.2f} |"
        )
    if arguments.json:
        content = {"host": asdict(this_host()), "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
