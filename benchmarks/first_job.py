"""The first job after a start, at a resolution that this process has not seen, against a warm one.

    python -m benchmarks.first_job --json benchmarks/results/first_job.json
    python -m benchmarks.first_job --model wan2.1-t2v-1.3b --size 832x480 --device cuda

Two fresh processes in a row load the model, warm up as the worker does, and run the same job three times. The
first process fills the cache of compiled code (an empty folder, unless ``--cache`` names another); the second
one finds it filled, and its first job over the median of its later ones is the ratio that counts.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from configs.compute import CompileMode, ComputeReport, ComputeSettings
from configs.job import JobFinished, JobParameters, JobPaths
from configs.model_preset import BUNDLED_MODEL, find_model
from configs.resolve import GenerationRequest, resolve

if TYPE_CHECKING:
    from pipelines import LoadedPipeline

JOBS = 3
CACHE_VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


class Start(BaseModel):
    """One process: seconds of each part."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    load_seconds: float
    warm_up_seconds: float
    job_seconds: tuple[float, ...]
    compute: ComputeReport

    @property
    def ratio(self) -> float:
        """The first job over the median of the later ones."""
        first, *later = self.job_seconds
        return first / statistics.median(later)


def run_here(arguments: argparse.Namespace) -> Start:
    """What one process does."""
    from pipelines import load_pipeline, warm_up

    preset = find_model(arguments.model)
    request = GenerationRequest(
        prompt="a red circle moving left",
        size=arguments.size,
        num_frames=arguments.num_frames,
        num_inference_steps=arguments.steps,
        seed=1,
    )
    params = resolve(request, preset, preset.attention)
    compute = ComputeSettings(compile=arguments.compile)
    loaded = load_pipeline(preset, device=arguments.device, compute=compute)
    warm = warm_up(loaded, preset.attention)
    with tempfile.TemporaryDirectory() as folder:
        jobs = [_job(loaded, params, Path(folder) / "clip.mp4") for _ in range(JOBS)]
    return Start(
        load_seconds=loaded.load_seconds,
        warm_up_seconds=warm,
        job_seconds=tuple(seconds for seconds, _ in jobs),
        compute=jobs[-1][1],
    )


def _job(loaded: "LoadedPipeline", params: JobParameters, path: Path) -> tuple[float, ComputeReport]:
    from pipelines import run_job

    loaded.texts.clear()
    start = time.perf_counter()
    (last,) = deque(run_job(loaded, params, JobPaths(path), is_cancelled=lambda: False), maxlen=1)
    if not isinstance(last, JobFinished) or last.result.compute is None:
        raise RuntimeError(f"a job ended with {last!r} instead of JobFinished")
    return time.perf_counter() - start, last.result.compute


def in_new_process(given: list[str], cache: Path) -> Start:
    """The same in a process of its own, whose caches are below ``cache``."""
    environment = os.environ | {name: str(cache / folder) for name, folder in CACHE_VARIABLES.items()}
    command = [sys.executable, "-m", "benchmarks.first_job", *given, "--here"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, encoding="utf-8")
    return Start.model_validate_json(done.stdout.splitlines()[-1])


def main(given: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    modes: tuple[CompileMode, ...] = ("auto", "on", "off")
    parser.add_argument("--model", default=BUNDLED_MODEL)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compile", choices=modes, default="on")
    parser.add_argument("--size", help="WIDTHxHEIGHT, another than the model's default", default="128x96")
    parser.add_argument("--num-frames", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--cache", type=Path, help="folder of compiled code; default: a new, empty one")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = sys.argv[1:] if given is None else given
    arguments = parser.parse_args(given)
    if arguments.here:
        print(run_here(arguments).model_dump_json())
        return
    with tempfile.TemporaryDirectory() as empty:
        cache = arguments.cache or Path(empty)
        starts = {name: in_new_process(given, cache) for name in ("cache as found", "cache filled")}
    print("| start | load | warm-up | first job | later jobs | first / later | compiled |")
    print("|---|---|---|---|---|---|---|")
    for name, start in starts.items():
        first, *later = start.job_seconds
        print(
            f"| {name} | {start.load_seconds:.1f} s | {start.warm_up_seconds:.1f} s | {first:.2f} s "
            f"| {statistics.median(later):.2f} s | {start.ratio:.2f} "
            f"| {start.compute.eager_reason or 'yes'} |"
        )
    if arguments.json:
        from benchmarks.host import this_host

        content = {
            "host": asdict(this_host()),
            "size": arguments.size,
            "starts": {name: start.model_dump() | {"ratio": start.ratio} for name, start in starts.items()},
        }
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
