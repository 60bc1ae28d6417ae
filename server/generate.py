"""``reelwright generate``: one job in this process, with a progress bar.

Knows: the pipelines contract and the terminal. Does not know: queues, HTTP, tensors.
"""

import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from configs.compute import ComputeReport
from configs.job import (
    JobFailedError,
    JobFinished,
    JobParameters,
    JobPaths,
    JobResult,
    StageStarted,
    StepFinished,
)
from configs.manifest import Manifest
from configs.model_preset import ModelPreset
from configs.resolve import GenerationRequest, RequestError, resolve
from configs.settings import Settings, SettingsError
from server.model_choice import choose_model
from server.progress import after_step, at_stage
from server.rerun import rerun_parameters
from server.torch_environment import set_up_torch_environment
from server.validation import problem_of_body

STAGE_TITLES = {
    "load": "loading the model",
    "text_encode": "reading the prompt",
    "denoise": "denoising",
    "vae_decode": "decoding",
    "encode_mp4": "writing the MP4",
    "store": "storing",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What will run, checked as far as that can be done before the model is loaded."""

    settings: Settings
    preset: ModelPreset
    parameters: JobParameters
    output: Path


def plan(settings: Settings, request: GenerationRequest, output: Path) -> Plan:
    """Check everything that costs nothing to check. Raises SettingsError."""
    _check_output(output)
    preset, attention = choose_model(settings)
    try:
        parameters = resolve(request, preset, attention)
    except RequestError as error:
        raise SettingsError(str(error)) from error
    return Plan(settings, preset, parameters, output)


def plan_rerun(settings: Settings, manifest: Path, output: Path) -> Plan:
    """The same for the clip of a manifest, which says all of it. Raises SettingsError."""
    _check_output(output)
    preset, _ = choose_model(settings)
    try:
        return Plan(settings, preset, rerun_parameters(_read_manifest(manifest), preset), output)
    except RequestError as error:
        raise SettingsError(f"--manifest {manifest}: {error}") from error


def _read_manifest(path: Path) -> Manifest:
    """From a file of JSON, or from the comment of an MP4 file."""
    try:
        match path.suffix.lower():
            case ".json":
                return Manifest.model_validate_json(path.read_bytes())
            case ".mp4":
                from pipelines import read_manifest

                found = read_manifest(path)
            case _:
                raise SettingsError(f"--manifest {path} must end in .json or .mp4")
    except OSError as error:
        raise SettingsError(f"--manifest {path} cannot be read: {error.strerror}") from error
    except JobFailedError as error:
        raise SettingsError(f"--manifest: {error.message}") from error
    except ValidationError as error:
        raise SettingsError(f"--manifest {path}: {problem_of_body(error, Manifest).message}") from error
    if found is None:
        raise SettingsError(f"--manifest {path} holds no manifest; Reelwright writes one into each MP4 file")
    return found


def _check_output(output: Path) -> None:
    if output.suffix.lower() != ".mp4":
        raise SettingsError(f"--output {output} must end in .mp4; that is the only format written")
    _check_writable(output)


def _check_writable(output: Path) -> None:
    try:
        if output.is_dir() or not output.absolute().parent.is_dir():
            raise SettingsError(f"--output {output} is not a file in an existing folder")
        with tempfile.TemporaryFile(dir=output.absolute().parent):
            pass
    except OSError as error:
        raise SettingsError(f"--output {output} cannot be written: {error.strerror}") from error


def run(plan: Plan, console: Console) -> JobResult:
    """Make the clip; an existing file is replaced when the new one is whole.

    Raises:
        JobFailedError: the reason. JobCancelledError: Ctrl-C. Nothing is left behind in both cases.
    """
    with _interruptible() as interrupted, _bar(console) as bar:
        task = bar.add_task(STAGE_TITLES["load"], total=100)
        set_up_torch_environment()
        from pipelines import load_pipeline, run_job

        settings = plan.settings
        loaded = load_pipeline(
            plan.preset,
            device=settings.device,
            dtype=settings.dtype,
            memory=settings.memory,
            compute=settings.compute,
        )
        events = run_job(loaded, plan.parameters, JobPaths(plan.output), is_cancelled=interrupted.is_set)
        for event in events:
            match event:
                case StageStarted(stage):
                    bar.update(task, description=STAGE_TITLES[stage], completed=at_stage(stage))
                case StepFinished(step, total_steps):
                    title = f"{STAGE_TITLES['denoise']}, step {step}/{total_steps}"
                    bar.update(task, description=title, completed=after_step(step, total_steps))
                case JobFinished(result):
                    bar.update(task, description="done", completed=100)
                    finished = result
    return finished


def report(plan: Plan, result: JobResult, console: Console) -> None:
    """Say what ran."""
    parameters, metrics, attention, file = plan.parameters, result.metrics, result.attention, result.file
    steps = metrics.step_seconds
    lines = {
        "file": f"{plan.output} ({file.bytes / 1000:.0f} kB, {file.codec})",
        "clip": f"{file.width}x{file.height}, {file.frames} frames at {file.fps:g} fps "
        f"({file.frames / file.fps:.2f} s), seed {parameters.seed}",
        "model": f"{plan.preset.name} on {result.device} in {result.dtype}",
        "attention": f"{attention.backend} ({attention.implementation}), density {attention.density:.3f}, "
        f"{attention.sparse_calls} sparse and {attention.dense_calls} dense calls",
        "time": f"{metrics.total_seconds:.2f} s"
        + (f", {parameters.num_inference_steps} steps of {steps.median:.3f} s" if steps else ""),
        "memory": f"{metrics.peak_memory_bytes / 2**20:.0f} MiB at peak",
    }
    if result.memory is not None and result.memory.offload != "none":
        lines["offload"] = result.memory.offload
    if result.compute is not None:
        lines["compute"] = _how_computed(result.compute)
    if result.decode is not None and result.decode.failed:
        lines["decode"] = f"{result.decode.rung}; out of memory: {', '.join(result.decode.failed)}"
    for name, text in lines.items():
        console.print(f"[bold]{name:>9}[/]  {escape(text)}", highlight=False, soft_wrap=True)
    for warning in result.warnings:
        console.print(f"[yellow]  warning[/]  {escape(warning)}", highlight=False, soft_wrap=True)


def _how_computed(ran: ComputeReport) -> str:
    parts = ["compiled" if ran.compiled else f"eager ({ran.eager_reason})", f"precision {ran.precision}"]
    if ran.fused:
        parts.append("fused")
    if ran.guidance != "none":
        parts.append(f"guidance {ran.guidance}")
    if ran.step_cache != "off":
        parts.append(f"{ran.step_cache} answered {ran.cached_passes} of {ran.passes} passes")
    return ", ".join(parts)


def _bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    return Progress(*columns, TimeElapsedColumn(), console=console)


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets, so that a job ends in order; a second Ctrl-C ends the process."""
    interrupted = threading.Event()

    def on_signal(number: int, frame: object) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
