"""Whole jobs of the bundled model on a CPU: the plain Diffusers pipeline against ours.

    python -m benchmarks.pipeline_cpu --json benchmarks/results/pipeline_cpu.json

Every variant makes the same clip (prompt, seed, size, steps) from the same weights, the plain pipeline with
Diffusers' own code up to ``export_to_video``. Jobs of all variants alternate, so that all meet the same load;
``cpu`` counts the processor seconds of the process and of its ffmpeg. The plain pipeline's first row is what
its documentation shows: ``from_pretrained`` without a dtype, float32. On a busy machine run it with
``OMP_WAIT_POLICY=PASSIVE``: otherwise threads that wait for each other count as work.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from diffusers import WanPipeline
from diffusers.utils import export_to_video
from numpy.typing import NDArray

from benchmarks.clips import decode_frames
from benchmarks.host import this_host
from configs.attention import AttentionOverrides
from configs.job import JobFinished, JobParameters, JobPaths
from configs.model_preset import BUNDLED_MODEL, ModelPreset, find_model
from configs.resolve import GenerationRequest, resolve
from pipelines import load_pipeline, run_job
from pipelines.precision import choose_precision

PROMPT = "a red circle moving left quickly on a white background"
SEED = 1
STOCK = "plain Diffusers, float32"
Frames = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Job:
    """One job's seconds: by the clock, by the processor, and of its steps."""

    seconds: float
    cpu_seconds: float
    step_seconds: float


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to make the clip. ``make`` writes the MP4 and returns the median seconds of a step."""

    name: str
    make: Callable[[Path], float]
    jobs: list[Job] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of a variant's jobs, ratios to the first variant, and how far the pictures are from its own."""

    variant: str
    job_seconds: float
    job_cpu_seconds: float
    step_seconds: float
    job_ratio: float
    job_cpu_ratio: float
    step_ratio: float
    psnr_db: float | None


def stock(preset: ModelPreset, params: JobParameters, dtype: torch.dtype) -> Callable[[Path], float]:
    """The pipeline as its documentation uses it, for the same clip."""
    pipe = WanPipeline.from_pretrained(preset.folder, dtype=dtype)
    pipe.set_progress_bar_config(disable=True)

    def make(path: Path) -> float:
        ends = [time.perf_counter()]

        def step_ended(
            pipe: object, step: int, timestep: object, tensors: dict[str, object]
        ) -> dict[str, object]:
            ends.append(time.perf_counter())
            return {}

        frames = pipe(
            prompt=params.prompt,
            negative_prompt=params.negative_prompt,
            width=params.width,
            height=params.height,
            num_frames=params.num_frames,
            num_inference_steps=params.num_inference_steps,
            guidance_scale=params.guidance_scale,
            generator=torch.Generator("cpu").manual_seed(params.seed),
            max_sequence_length=preset.max_sequence_length,
            callback_on_step_end=step_ended,
        ).frames[0]
        export_to_video(frames, str(path), fps=params.fps)
        # The first one also holds the text encoding.
        return statistics.median(np.diff(ends[1:]).tolist())

    return make


def ours(preset: ModelPreset, params: JobParameters, dtype: str) -> Callable[[Path], float]:
    """The job as the server runs it."""
    loaded = load_pipeline(preset, device="cpu", dtype=dtype)

    def make(path: Path) -> float:
        loaded.texts.clear()  # else later jobs would find their prompt encoded
        (last,) = deque(run_job(loaded, params, JobPaths(path), is_cancelled=lambda: False), maxlen=1)
        if not isinstance(last, JobFinished) or last.result.metrics.step_seconds is None:
            raise RuntimeError(f"a job ended with {last!r} instead of JobFinished")
        return last.result.metrics.step_seconds.median

    return make


def run_once(variant: Variant, path: Path) -> Job:
    """Make the clip at ``path``."""
    before, start = _cpu_seconds(), time.perf_counter()
    step = variant.make(path)
    return Job(time.perf_counter() - start, _cpu_seconds() - before, step)


def _cpu_seconds() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def psnr_db(one: Frames, other: Frames) -> float | None:
    """Peak signal-to-noise ratio in dB; None for equal pictures."""
    error = np.mean((one.astype(np.float64) - other.astype(np.float64)) ** 2)
    return float(10 * np.log10(255**2 / error)) if error else None


def measure(variants: list[Variant], params: JobParameters, repeats: int) -> list[Row]:
    """Jobs in turn, after one of each that is not counted."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{index}.mp4" for index in range(len(variants))]
        for repeat in range(repeats + 1):
            for variant, path in zip(variants, paths, strict=True):
                job = run_once(variant, path)
                if repeat:
                    variant.jobs.append(job)
                    print(f"{variant.name}: {job.seconds:.2f} s, cpu {job.cpu_seconds:.2f} s", flush=True)
        pictures = [decode_frames(path, params.height, params.width) for path in paths]
    base = _medians(variants[0])
    rows = []
    for variant, shown in zip(variants, pictures, strict=True):
        own = _medians(variant)
        rows.append(
            Row(
                variant=variant.name,
                job_seconds=own.seconds,
                job_cpu_seconds=own.cpu_seconds,
                step_seconds=own.step_seconds,
                job_ratio=own.seconds / base.seconds,
                job_cpu_ratio=own.cpu_seconds / base.cpu_seconds,
                step_ratio=own.step_seconds / base.step_seconds,
                psnr_db=psnr_db(pictures[0], shown),
            )
        )
    return rows


def _medians(variant: Variant) -> Job:
    names = ("seconds", "cpu_seconds", "step_seconds")
    return Job(*(statistics.median(getattr(job, name) for job in variant.jobs) for name in names))


def all_variants(preset: ModelPreset, steps: int | None) -> tuple[list[Variant], JobParameters]:
    """The rows of the table; the first is what all are compared with."""
    request = GenerationRequest(prompt=PROMPT, seed=SEED, num_inference_steps=steps)
    default = resolve(request, preset, preset.attention)
    asked = {
        "dense": request.model_copy(update={"attention": AttentionOverrides(backend="dense")}),
        "cached": request.model_copy(update={"step_cache": "taylor_seer"}),
    }
    dense, cached = (resolve(each, preset, preset.attention) for each in asked.values())
    variants = [Variant(STOCK, stock(preset, default, torch.float32))]
    if choose_precision("cpu", "auto").network == torch.bfloat16:  # elsewhere it takes many times as long
        variants += [
            Variant("plain Diffusers, bfloat16", stock(preset, default, torch.bfloat16)),
            Variant("ours, float32, dense", ours(preset, dense, "float32")),
            Variant("ours, float32, the model's attention", ours(preset, default, "float32")),
        ]
    return [
        *variants,
        Variant("ours, dtype auto, dense", ours(preset, dense, "auto")),
        Variant("ours, as served (dtype auto, the model's attention)", ours(preset, default, "auto")),
        Variant("ours, the same with step_cache=taylor_seer", ours(preset, cached, "auto")),
    ], default


def table(rows: list[Row]) -> str:
    """Markdown."""
    lines = [
        "| variant | job | cpu | step | job / plain | cpu / plain | step / plain | PSNR to plain |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        psnr = "equal" if row.psnr_db is None else f"{row.psnr_db:.1f} dB"
        lines.append(
            f"| {row.variant} | {row.job_seconds:.2f} s | {row.job_cpu_seconds:.2f} s "
            f"| {row.step_seconds:.3f} s | {row.job_ratio:.2f} | {row.job_cpu_ratio:.2f} "
            f"| {row.step_ratio:.2f} | {psnr} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--repeats", type=int, default=5, help="counted jobs of each variant")
    parser.add_argument("--steps", type=int, help="denoise steps; default: the model's")
    arguments = parser.parse_args()
    variants, params = all_variants(find_model(BUNDLED_MODEL), arguments.steps)
    rows = measure(variants, params, arguments.repeats)
    print(table(rows))
    if arguments.json:
        content = {
            "host": asdict(this_host()),
            "steps": params.num_inference_steps,
            "rows": [asdict(row) for row in rows],
            "jobs": {variant.name: [asdict(job) for job in variant.jobs] for variant in variants},
        }
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
