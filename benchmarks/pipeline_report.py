"""What the pipeline benchmark found: ratios to the first variant, targets, a table, the JSON file.

Knows: statistics over rounds. Does not know: torch, processes, or how anything was measured.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from benchmarks.architectures import ARCHITECTURES, Architecture
from benchmarks.pipeline_records import Facts, Failure, Round
from benchmarks.variants import Variant

Measure = Literal["time", "peak"]
GIBIBYTE = 2**30


@dataclass
class Row:
    """One variant: what it is, its rounds, and why there are no more of them."""

    variant: Variant
    facts: Facts | None = None
    rounds: list[Round] = field(default_factory=list)
    failure: str | None = None

    def take(self, found: Facts | Round | Failure) -> None:
        """Keep an answer."""
        match found:
            case Facts():
                self.facts = found
            case Round():
                self.rounds.append(found)
            case Failure(reason):
                self.failure = reason

    @property
    def seconds(self) -> float:
        """Median over the rounds of a job's, or a step's, seconds."""
        return statistics.median(found.seconds for found in self.rounds)

    @property
    def step_spread(self) -> tuple[float, float, float]:
        """Seconds of a step: 10th percentile, median and 90th percentile over all rounds."""
        ordered = sorted(each for found in self.rounds for each in found.step_seconds)
        tenth = len(ordered) // 10
        return ordered[tenth], statistics.median(ordered), ordered[-1 - tenth]

    @property
    def peak_bytes(self) -> int:
        """The highest peak of any stage and round."""
        return max(max(found.peak_bytes.values()) for found in self.rounds)

    def against(self, other: "Row", measure: Measure) -> float | None:
        """Ratio to the other row; of time it is the median over the rounds."""
        if not self.rounds or not other.rounds:
            return None
        if measure == "peak":
            return self.peak_bytes / other.peak_bytes
        pairs = zip(self.rounds, other.rounds, strict=False)
        return statistics.median(mine.seconds / theirs.seconds for mine, theirs in pairs)

    def difference(self, other: "Row") -> float | None:
        """Relative distance of the results, in the values that both sent; None of jobs."""
        if not self.rounds or not other.rounds or not self.rounds[0].output:
            return None
        pairs = list(zip(self.rounds[0].output, other.rounds[0].output, strict=True))
        apart = sum((mine - theirs) ** 2 for mine, theirs in pairs)
        return float((apart / sum(theirs**2 for _, theirs in pairs)) ** 0.5)


@dataclass(frozen=True, slots=True)
class Target:
    """What compiled variants should reach: at most so much of another one's time or peak memory.

    It is for all compiled variants with this attention, in fp8 or not as it says.
    """

    architecture: str
    whole_job: bool
    measure: Measure
    at_most: float
    attention: Literal["dense", "sparse"] = "sparse"
    fp8: bool = False
    against: str = "stock"
    layers: int | None = None

    def is_for(self, variant: Variant) -> bool:
        """Whether the variant should reach it."""
        switches = variant.switches
        fp8 = bool({"fp8", "fp8attention"} & switches)
        return (variant.attention, fp8) == (self.attention, self.fp8) and "compile" in switches


# Goals set before anything was built, for the published clips and, unless they say otherwise, all layers.
TARGETS = (
    Target("wan2.1-t2v-1.3b", False, "time", 0.34),
    Target("wan2.1-t2v-1.3b", False, "time", 0.26, fp8=True),
    Target("wan2.1-t2v-1.3b", False, "peak", 0.75),
    Target("wan2.1-t2v-14b", False, "time", 0.32, layers=8),
    Target("wan2.1-t2v-14b", False, "time", 0.24, fp8=True, layers=8),
    Target("wan2.1-t2v-14b", False, "peak", 0.62, layers=8),
    Target("wan2.1-t2v-1.3b", True, "time", 0.38),
    Target("wan2.1-t2v-1.3b", True, "peak", 0.30),
    Target("wan2.1-t2v-1.3b", True, "time", 1.0, attention="dense"),
    Target("wan2.1-t2v-1.3b", True, "peak", 1.0, attention="dense"),
    Target("article-7b", False, "time", 0.50),
    Target("article-7b", False, "peak", 0.80),
    Target("article-7b", False, "peak", 0.56, against="stock+scores"),
)


@dataclass(frozen=True)
class Outcome:
    """A target and what was measured of it."""

    target: Target
    variant: Variant
    ratio: float

    @property
    def met(self) -> bool:
        """Whether it is reached."""
        return self.ratio <= self.target.at_most


@dataclass
class Report:
    """Everything of one run. The first row is what the others are compared with."""

    architecture: Architecture
    whole_job: bool
    settings: dict[str, object]
    rows: list[Row]

    @property
    def full(self) -> Architecture:
        """The architecture with all its layers and its published clip."""
        return ARCHITECTURES[self.architecture.name]

    def outcomes(self) -> list[Outcome]:
        """The targets that this run says something about."""
        here, full = self.architecture, self.full
        clip = (here.width, here.height, here.num_frames)
        if clip != (full.width, full.height, full.num_frames):
            return []
        others = {str(row.variant): row for row in self.rows}
        found = []
        for target in TARGETS:
            if (target.architecture, target.whole_job) != (here.name, self.whole_job):
                continue
            if here.layers != (target.layers or full.layers) or target.against not in others:
                continue
            for row in self.rows:
                ratio = row.against(others[target.against], target.measure)
                if target.is_for(row.variant) and ratio is not None:
                    found.append(Outcome(target, row.variant, ratio))
        return found

    def content(self) -> dict[str, object]:
        """For the JSON file."""
        base = self.rows[0]
        machines = [row.facts.machine for row in self.rows if row.facts]
        return {
            "machine": machines[0] if machines else None,
            "architecture": self.architecture.name,
            "layers": self.architecture.layers,
            "all_layers": self.full.layers,
            "tokens": self.architecture.tokens,
            "whole_job": self.whole_job,
            **self.settings,
            "rows": [_row_content(row, base) for row in self.rows],
            "targets": [
                {
                    **asdict(outcome.target),
                    "variant": str(outcome.variant),
                    "ratio": outcome.ratio,
                    "met": outcome.met,
                }
                for outcome in self.outcomes()
            ],
        }

    def write(self, path: Path) -> None:
        """Write the JSON file, whole or not at all."""
        unfinished = path.with_name(f"{path.name}.tmp")
        unfinished.write_text(json.dumps(self.content(), indent=1) + "\n", encoding="utf-8")
        unfinished.replace(path)

    def table(self) -> str:
        """Markdown: one line a variant, then the targets."""
        header, cells = self._job_cells() if self.whole_job else self._step_cells()
        lines = [self._title(), "", *_table(header, cells)]
        failures = [f"{row.variant} failed: {row.failure}" for row in self.rows if row.failure]
        outcomes = self.outcomes()
        if outcomes:
            lines += ["", *_table(("variant", "of", "what", "ratio", "target", ""), _target_cells(outcomes))]
        return "\n".join([*lines, *(["", *failures] if failures else [])])

    def _title(self) -> str:
        here = self.architecture
        layers = f"{here.layers} layers"
        if here.layers != self.full.layers:
            layers = f"{here.layers} of {self.full.layers} layers"
        what = "whole jobs" if self.whole_job else "one forward pass"
        clip = f"{here.width}x{here.height}, {here.num_frames} frames, {here.tokens:,} tokens"
        return f"{here.name}, {what}, {layers}, {clip}"

    def _step_cells(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        base = self.rows[0]
        times = ("step", "10% to 90%", "ratio", "rounds")
        header: tuple[str, ...] = ("variant", *times, "peak", "ratio", "differs by", "ran")
        cells: list[tuple[str, ...]] = []
        for row in self.rows:
            if not row.rounds:
                continue
            low, middle, high = row.step_spread
            cells.append(
                (
                    str(row.variant),
                    f"{middle * 1e3:.1f} ms",
                    f"{low * 1e3:.1f} to {high * 1e3:.1f}",
                    _number(row.against(base, "time")),
                    " ".join(f"{found.seconds * 1e3:.1f}" for found in row.rounds),
                    f"{row.peak_bytes / GIBIBYTE:.2f} GiB",
                    _number(row.against(base, "peak")),
                    "" if (apart := row.difference(base)) is None else f"{apart:.1e}",
                    row.rounds[-1].ran,
                )
            )
        return header, cells

    def _job_cells(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        base = self.rows[0]
        stages = ("text_encode", "denoise", "vae_decode", "encode_mp4")
        header = (
            "variant",
            "job",
            "ratio",
            "rounds",
            "step",
            *stages,
            "peak",
            "ratio",
            "peak by stage",
            "ran",
        )
        cells: list[tuple[str, ...]] = []
        for row in self.rows:
            if not row.rounds:
                continue
            jobs = [found.job for found in row.rounds if found.job]
            peaks = row.rounds[-1].peak_bytes
            cells.append(
                (
                    str(row.variant),
                    f"{row.seconds:.2f} s",
                    _number(row.against(base, "time")),
                    " ".join(f"{found.seconds:.2f}" for found in row.rounds),
                    f"{row.step_spread[1] * 1e3:.1f} ms",
                    *(f"{statistics.median(getattr(job, stage) for job in jobs):.2f} s" for stage in stages),
                    f"{row.peak_bytes / GIBIBYTE:.2f} GiB",
                    _number(row.against(base, "peak")),
                    ", ".join(f"{stage} {peak / GIBIBYTE:.2f}" for stage, peak in peaks.items()),
                    row.rounds[-1].ran,
                )
            )
        return header, cells


def same_weights(rows: Sequence[Row]) -> bool:
    """Whether all processes had the same weights."""
    return len({tuple(sorted(row.facts.fingerprints.items())) for row in rows if row.facts}) <= 1


def _row_content(row: Row, base: Row) -> dict[str, object]:
    measured: dict[str, object] = {}
    if row.rounds:
        low, middle, high = row.step_spread
        measured = {
            "seconds": row.seconds,
            "time_ratio": row.against(base, "time"),
            "step_seconds": {"p10": low, "median": middle, "p90": high},
            "peak_bytes": row.peak_bytes,
            "peak_ratio": row.against(base, "peak"),
            "difference": row.difference(base),
            "rounds": [{**asdict(found), "output": len(found.output)} for found in row.rounds],
        }
    return {
        "variant": str(row.variant),
        "fingerprints": dict(row.facts.fingerprints) if row.facts else None,
        "weight_bytes": dict(row.facts.weight_bytes) if row.facts else None,
        "failure": row.failure,
        **measured,
    }


def _target_cells(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    return [
        (
            str(each.variant),
            each.target.against,
            each.target.measure,
            f"{each.ratio:.3f}",
            f"{each.target.at_most:.2f}",
            "met" if each.met else "missed",
        )
        for each in outcomes
    ]


def _number(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3f}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]
