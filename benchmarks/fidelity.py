"""How far the latents of inexact modes are from those of full precision without a cache.

    python -m benchmarks.fidelity --json fidelity.json                   # the step caches, on any device
    python -m benchmarks.fidelity --precision fp8 --device cuda          # fp8, alone and with the caches

Each clip is made by a whole job of the bundled model; its latents are those of the checkpoint after the last
step. What people see is measured by ``benchmarks.prompt_following``, which has the same options.
"""

import argparse
import json
import statistics
import tempfile
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import torch
from safetensors import safe_open

from benchmarks.host import this_host
from configs.compute import ComputeSettings, ModelPrecision, StepCache
from configs.job import JobFinished, JobParameters, JobPaths
from configs.model_preset import BUNDLED_MODEL, find_model
from configs.resolve import GenerationRequest, resolve
from pipelines import LoadedPipeline, load_pipeline, run_job
from pipelines.bundled.prompts import prompt
from pipelines.bundled.world import held_out_specs


@dataclass(frozen=True, slots=True)
class Row:
    """Over all clips: cosine and relative error of the latents, and what the cache answered."""

    precision: ModelPrecision
    step_cache: StepCache
    cosine_least: float
    cosine_median: float
    relative_error_median: float
    cached_passes: int
    passes: int


def latents_of(loaded: LoadedPipeline, params: JobParameters, folder: Path) -> tuple[torch.Tensor, int, int]:
    """Float64 latents after the last step, cached passes and all passes of a whole job."""
    paths = JobPaths(folder / "clip.mp4", checkpoint=folder / "clip.safetensors")
    paths.checkpoint.unlink(missing_ok=True) if paths.checkpoint else None
    (last,) = deque(run_job(loaded, params, paths, is_cancelled=lambda: False), maxlen=1)
    if not isinstance(last, JobFinished) or last.result.compute is None:
        raise RuntimeError(f"a job ended with {last!r} instead of JobFinished")
    with safe_open(folder / "clip.safetensors", framework="pt") as file:
        latents: torch.Tensor = file.get_tensor("latents").double().flatten()
    return latents, last.result.compute.cached_passes, last.result.compute.passes


def measure(arguments: argparse.Namespace) -> list[Row]:
    """A row for each mode."""
    preset = find_model(BUNDLED_MODEL)
    jobs = [
        resolve(
            GenerationRequest(prompt=prompt(spec), seed=number, num_inference_steps=arguments.steps),
            preset,
            preset.attention,
        )
        for number, spec in enumerate(held_out_specs()[: arguments.prompts])
    ]
    caches: tuple[StepCache, ...] = get_args(StepCache)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        full = load_pipeline(preset, device=arguments.device)
        truths = [latents_of(full, job, folder)[0] for job in jobs]
        tried = full
        if arguments.precision == "fp8":
            tried = load_pipeline(preset, device=arguments.device, compute=ComputeSettings(precision="fp8"))
        for cache in caches:
            if cache == "off" and tried is full:
                continue
            made = [latents_of(tried, job.model_copy(update={"step_cache": cache}), folder) for job in jobs]
            pairs = list(zip(truths, (latents for latents, _, _ in made), strict=True))
            cosines = [float(torch.nn.functional.cosine_similarity(*pair, dim=0)) for pair in pairs]
            errors = [float((ours - truth).norm() / truth.norm()) for truth, ours in pairs]
            rows.append(
                Row(
                    precision=arguments.precision,
                    step_cache=cache,
                    cosine_least=min(cosines),
                    cosine_median=statistics.median(cosines),
                    relative_error_median=statistics.median(errors),
                    cached_passes=sum(cached for _, cached, _ in made),
                    passes=sum(passes for _, _, passes in made),
                )
            )
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", choices=get_args(ModelPrecision), default="full")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    rows = measure(arguments)
    print("| precision | step cache | cosine, least | median | relative error | passes cached |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row.precision} | {row.step_cache} | {row.cosine_least:.4f} | {row.cosine_median:.4f} "
            f"| {row.relative_error_median:.3f} | {row.cached_passes} of {row.passes} |"
        )
    if arguments.json:
        content = {"host": asdict(this_host()), "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
