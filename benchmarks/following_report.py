"""What a prompt-following benchmark found: the table for people, the JSON file, the contact sheet's clips.

Knows scored clips. Does not know how they are made.
"""

import statistics
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.host import this_host
from configs.job import JobParameters, JobResult
from pipelines import LoadedPipeline
from pipelines.bundled.read_back import ATTRIBUTES, ReadBack, Score, score_read_backs
from pipelines.bundled.world import ClipSpec

DENSE, DEFAULT, WINDOW, BLOCK_TOPK = "dense", "default", "window", "block_topk"
SHEET_CLIPS = 12


@dataclass(frozen=True, slots=True)
class Seen:
    """One clip: what was asked, how the job went, and what its MP4 shows."""

    spec: ClipSpec
    params: JobParameters
    result: JobResult
    shown: ReadBack

    @property
    def wrong(self) -> list[str]:
        """Attributes that are not as asked."""
        return [name for name in ATTRIBUTES if getattr(self.shown, name) != getattr(self.spec, name)]


@dataclass(frozen=True, slots=True)
class Seconds:
    """Wall-clock seconds over many clips; where other work ran too, the 10th percentile tells most."""

    p10: float
    median: float
    p90: float


@dataclass(slots=True)
class Run:
    """All clips of one attention setting so far, and the frames of the first few."""

    seen: list[Seen]
    frames: list[NDArray[np.uint8]]

    @property
    def score(self) -> Score:
        """Shares of clips that are as asked."""
        return score_read_backs([each.spec for each in self.seen], [each.shown for each in self.seen])

    @property
    def seconds(self) -> Seconds:
        """Of a job from its prompt to the MP4, the model being loaded."""
        ordered = sorted(each.result.metrics.total_seconds for each in self.seen)
        return Seconds(
            p10=ordered[len(ordered) // 10],
            median=statistics.median(ordered),
            p90=ordered[-1 - len(ordered) // 10],
        )


def print_report(runs: dict[str, Run]) -> None:
    """Scores and seconds as a Markdown table, then the clips on which each attribute is wrong."""
    columns = ("attention", *ATTRIBUTES, "all five", "clips", "density", "p10 s", "median s")
    print(f"\n| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    for name, run in runs.items():
        shares = [f"{getattr(run.score, each):.3f}" for each in (*ATTRIBUTES, "all_five")]
        density = f"{run.seen[-1].result.attention.density:.3f}"
        seconds = (f"{run.seconds.p10:.2f}", f"{run.seconds.median:.2f}")
        cells = (name, *shares, str(run.score.clips), density, *seconds)
        print(f"| {' | '.join(cells)} |")
    for name, difference in differences(runs).items():
        print(f"\n{name.replace('_', ' ')}, all five: {difference:+.3f}")
    for name, run in runs.items():
        for attribute in ATTRIBUTES:
            for each in run.seen:
                if attribute in each.wrong:
                    shown = getattr(each.shown, attribute)
                    print(f"{name}, {attribute}: {shown} in clip {each.params.seed}, {each.params.prompt!r}")


def differences(runs: dict[str, Run]) -> dict[str, float]:
    """``default_minus_dense`` and the like: all five of a sparse run less those of the dense one, if any."""
    if DENSE not in runs:
        return {}
    dense = runs[DENSE].score.all_five
    return {
        f"{name}_minus_{DENSE}": round(run.score.all_five - dense, 4)
        for name, run in runs.items()
        if name != DENSE
    }


def as_json(loaded: LoadedPipeline, runs: dict[str, Run], weights: str) -> dict[str, Any]:
    """What the JSON file holds."""
    return {
        "host": asdict(this_host()),
        "model": loaded.preset.name,
        "weights_sha256": weights,
        "device": str(loaded.device),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "vae_dtype": str(loaded.vae_dtype).removeprefix("torch."),
        "runs": {name: _run_content(run) for name, run in runs.items()},
    } | differences(runs)


def _run_content(run: Run) -> dict[str, Any]:
    last = run.seen[-1]
    return {
        "score": {name: round(value, 4) for name, value in asdict(run.score).items()},
        "seconds": {name: round(value, 3) for name, value in asdict(run.seconds).items()},
        "parameters": last.params.model_dump(mode="json", exclude={"model", "prompt", "seed"}),
        "attention": last.result.attention.model_dump(mode="json"),
        "wrong": [
            {"prompt": each.params.prompt, "seed": each.params.seed, "shown": asdict(each.shown)}
            for each in run.seen
            if each.wrong
        ],
    }


def sheet_clips(runs: dict[str, Run]) -> list[NDArray[np.uint8]]:
    """The first clips of every attention; of two, the first fills the left column and the other the right."""
    each = SHEET_CLIPS // len(runs)
    return [frames for run in runs.values() for frames in run.frames[:each]]
