"""One denoise pass of a Wan-shaped transformer on several GPUs of this host: time, efficiency, bytes moved.

    python -m benchmarks.parallel --ranks 1 2 4 --layers 8 --json parallel.json

Weights are random and the layers are the first few of the model's; every layer is alike. Each number of
ranks has processes of its own, that only compute when all have begun. Efficiency is the time on one GPU over
ranks x the time on so many. Before a time is taken, the result on a smaller clip is compared with one rank's
in float32; if it is worse than twice one rank's own error in bfloat16, nothing is written.
"""

import argparse
import copy
import json
import multiprocessing
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attention import ParallelReport, RankGroup, swap
from benchmarks.architectures import ARCHITECTURES, Architecture
from benchmarks.host import this_host
from benchmarks.pipeline_step import call_seconds, step_inputs
from benchmarks.random_models import random_module
from pipelines.parallel import ParallelGroup

MODEL = "wan2.1-t2v-14b"
SEED = 0
_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured.

    Attributes:
        tiny: the smallest model and clip, in float32 on the CPU: only to see the program run.
    """

    layers: int
    block_size: int
    anchor_stride: int
    repeats: int
    tiny: bool

    @property
    def architecture(self) -> Architecture:
        """The model, with few layers."""
        whole = ARCHITECTURES[MODEL]
        if self.tiny:
            # Heads that 2 and 4 ranks can share.
            small = whole.shrunk()
            part = small.transformer.changed({"num_attention_heads": 4})
            return replace(small, transformer=part)
        part = whole.transformer.changed({"num_layers": self.layers})
        return replace(whole, transformer=part, block_size=self.block_size, anchor_stride=self.anchor_stride)


@dataclass(frozen=True, slots=True)
class Measured:
    """On so many ranks; seconds of the slowest, medians.

    Attributes:
        error, error_alone: relative, in bfloat16 against one rank in float32, of a smaller clip.
        sparse, dense: what moved between ranks in the passes that were timed.
    """

    ranks: int
    error: float
    error_alone: float
    sparse_seconds: float
    dense_seconds: float
    sparse_call_bytes: int
    dense_call_bytes: int
    peak_bytes: int


@torch.no_grad()
def measure(setting: Setting, ranks: RankGroup | None, device: torch.device) -> Measured:
    """To be called on every rank alike."""
    architecture = setting.architecture
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    transformer: Any = random_module(architecture.transformer, device, dtype, SEED)
    small = architecture
    if not setting.tiny:
        small = replace(architecture, width=832, height=480, num_frames=33, block_size=1560)
    in_float32: Any = copy.deepcopy(transformer).float()
    exact = one_pass(small, in_float32, None, device, torch.float32)
    del in_float32
    alone = one_pass(small, transformer, None, device, dtype)
    together = one_pass(small, transformer, ranks, device, dtype)
    errors = [float((out.float() - exact).norm() / exact.norm()) for out in (together, alone)]
    if errors[0] > max(2 * errors[1], 1e-5):
        raise RuntimeError(
            f"{ranks.size if ranks else 1} ranks are off by {errors[0]:.2e}, one by {errors[1]:.2e}"
        )
    inputs: dict[str, Any] = {**step_inputs(architecture, transformer, device, dtype, SEED)}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds: dict[bool, float] = {}
    moved: dict[bool, ParallelReport | None] = {}
    for is_dense in (False, True):
        with swapped(architecture, transformer, ranks) as handle:
            handle.set_dense("benchmark" if is_dense else None)
            run = partial(one_call, transformer, inputs)
            run()
            if ranks is not None:
                ranks.gather(torch.zeros(1, device=device)).wait()
            each, _ = call_seconds(run, device, setting.repeats)
            seconds[is_dense] = statistics.median(each)
            moved[is_dense] = handle.parallel_report()
    sparse, dense = moved[False], moved[True]
    return Measured(
        ranks=ranks.size if ranks else 1,
        error=errors[0],
        error_alone=errors[1],
        sparse_seconds=seconds[False],
        dense_seconds=seconds[True],
        sparse_call_bytes=sparse.sparse_call_bytes if sparse else 0,
        dense_call_bytes=dense.dense_call_bytes if dense else 0,
        peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
    )


def one_call(transformer: Any, inputs: dict[str, Any]) -> Tensor:
    """A forward pass."""
    out: Tensor = transformer(**inputs, return_dict=False)[0]
    return out


def one_pass(
    architecture: Architecture,
    transformer: Any,
    ranks: RankGroup | None,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """A sparse pass with the first layer dense."""
    inputs: dict[str, Any] = {**step_inputs(architecture, transformer, device, dtype, SEED)}
    with swapped(architecture, transformer, ranks, dense_layers=(0,)):
        return one_call(transformer, inputs)


def swapped(
    architecture: Architecture, transformer: Any, ranks: RankGroup | None, dense_layers: Sequence[int] = ()
) -> Any:
    """As the server swaps, over these ranks."""
    return swap(
        transformer,
        block_size=architecture.block_size,
        anchor_stride=architecture.anchor_stride,
        dense_layers=dense_layers,
        ranks=ranks,
    )


def on_rank(rank: int, size: int, meeting: str, setting: Setting, pipe: "Connection[Measured, None]") -> None:
    """Entry point of a process."""
    device = torch.device("cpu") if setting.tiny else torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = ParallelGroup(rank, size, meeting, device, timeout_seconds=600)
    pipe.send(measure(setting, group.everyone if size > 1 else None, device))
    group.close()


def run(size: int, setting: Setting) -> Measured:
    """Start so many processes; the slowest one's seconds, the largest number of bytes.

    Raises:
        RuntimeError: one ended without a result; the others, which wait for it, are ended too.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            ours, theirs = _SPAWN.Pipe()
            process = _SPAWN.Process(target=on_rank, args=(rank, size, f"{folder}/meeting", setting, theirs))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            found = _one_of_each(pipes)
        except EOFError:
            for process in processes:
                process.kill()
            raise RuntimeError(f"one of {size} ranks failed: its error is above") from None
        finally:
            for process in processes:
                process.join()
    return replace(
        found[0],
        sparse_seconds=max(each.sparse_seconds for each in found),
        dense_seconds=max(each.dense_seconds for each in found),
        sparse_call_bytes=max(each.sparse_call_bytes for each in found),
        dense_call_bytes=max(each.dense_call_bytes for each in found),
        peak_bytes=max(each.peak_bytes for each in found),
    )


def _one_of_each(pipes: "Sequence[Connection[None, Measured]]") -> list[Measured]:
    """By rank. Raises EOFError as soon as one has ended without a result."""
    found: dict[int, Measured] = {}
    while len(found) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in found}
        for pipe in wait(list(waiting)):
            assert isinstance(pipe, Connection)
            found[waiting[pipe]] = pipe.recv()
    return [found[rank] for rank in range(len(pipes))]


def efficiency(alone: float, together: float, ranks: int) -> float:
    """1 is linear."""
    return alone / (ranks * together)


def table(rows: Sequence[Measured]) -> str:
    """For people; the first row is the one that efficiency is measured against."""
    lines = ["ranks | error (one rank) | sparse pass | of linear | dense pass | of linear | MB a layer: both"]
    first = rows[0]
    for row in rows:
        sparse = efficiency(first.sparse_seconds * first.ranks, row.sparse_seconds, row.ranks)
        dense = efficiency(first.dense_seconds * first.ranks, row.dense_seconds, row.ranks)
        lines.append(
            f"{row.ranks} | {row.error:.1e} ({row.error_alone:.1e}) | "
            f"{1e3 * row.sparse_seconds:.1f} ms | {sparse:.3f} | "
            f"{1e3 * row.dense_seconds:.1f} ms | {dense:.3f} | "
            f"{row.sparse_call_bytes / 1e6:.1f}, {row.dense_call_bytes / 1e6:.1f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--block-size", type=int, default=ARCHITECTURES[MODEL].block_size)
    parser.add_argument("--anchor-stride", type=int, default=ARCHITECTURES[MODEL].anchor_stride)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    said = parser.parse_args()
    setting = Setting(said.layers, said.block_size, said.anchor_stride, said.repeats, said.tiny)
    rows = [run(size, setting) for size in said.ranks]
    print(table(rows))
    if said.json:
        found = {
            "host": asdict(this_host()),
            "setting": asdict(setting),
            "rows": [asdict(row) for row in rows],
        }
        said.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
