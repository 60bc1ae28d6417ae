"""Whole jobs, prompt to MP4: Diffusers' own pipeline and export, and ours, on the same random weights.

Knows: both ways of running a Wan pipeline, and how to time the stages of the stock one from outside. Does not
know: single passes, other processes. Every job has a prompt of its own, and ours begins with no text encoded.
"""

import random
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import export_to_video

from benchmarks.architectures import Architecture
from benchmarks.pipeline_machine import describe_machine
from benchmarks.pipeline_records import Facts, JobSeconds, Request, Round
from benchmarks.pipeline_step import (
    attention_kernels,
    compile_stock,
    network_dtype,
    stock_attention,
    synchronize,
)
from benchmarks.random_models import WORDS, fingerprint, random_pipeline, weight_bytes
from configs.attention import AttentionConfig
from configs.compute import ComputeSettings
from configs.geometry import VideoGeometry
from configs.job import JobFinished, JobParameters, JobPaths, JobResult, StepFinished
from configs.memory import MemoryOptions
from configs.model_preset import ModelPreset
from pipelines import run_job
from pipelines.loading import made_ready
from pipelines.memory import peak_meter, release_memory
from pipelines.precision import Precision, resolve_device

PROMPT_WORDS = 60
WARM_UP_STEPS = 2


class JobBench:
    """A pipeline with random weights that runs one job after another; subclasses say how."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.device = resolve_device(request.device)
        self.pipe = random_pipeline(
            request.architecture, self.device, network_dtype(self.device), request.seed
        )
        parts = {name: getattr(self.pipe, name) for name in request.architecture.components}
        self._facts = Facts(
            machine=describe_machine(),
            fingerprints={name: fingerprint(part) for name, part in parts.items()},
            weight_bytes={name: weight_bytes(part) for name, part in parts.items()},
        )
        self._jobs = 0

    def facts(self) -> Facts:
        return self._facts

    def warm_up(self) -> None:
        self._one(WARM_UP_STEPS)

    def measure(self) -> Round:
        return self._one(self.request.steps)

    def _one(self, steps: int) -> Round:
        self._jobs += 1
        with tempfile.TemporaryDirectory() as folder:
            found = self.run(prompt_of(self._jobs), steps, Path(folder) / "clip.mp4")
        release_memory(self.device)
        return found

    def run(self, prompt: str, steps: int, path: Path) -> Round:
        """One job of so many steps."""
        raise NotImplementedError


def prompt_of(job: int) -> str:
    """Random words of the tokenizer, others for each job."""
    choose = random.Random(job)
    return " ".join(f"w{choose.randrange(WORDS)}" for _ in range(PROMPT_WORDS))


class StockJobBench(JobBench):
    """``pipe(...)`` and ``export_to_video``, as Diffusers' documentation has them."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        if "compile" in request.variant.switches:
            compile_stock(self.pipe.transformer)
        if request.variant.offload == "model":
            self.pipe.enable_model_cpu_offload(device=self.device)

    def run(self, prompt: str, steps: int, path: Path) -> Round:
        architecture = self.request.architecture
        with attention_kernels(self.request.variant), StageClock(self.pipe, self.device) as clock:
            frames = self.pipe(
                prompt=prompt,
                negative_prompt="",
                width=architecture.width,
                height=architecture.height,
                num_frames=architecture.num_frames,
                num_inference_steps=steps,
                guidance_scale=architecture.guidance_scale,
                max_sequence_length=architecture.text_tokens,
                generator=torch.Generator("cpu").manual_seed(self.request.seed),
                callback_on_step_end=clock.step,
            ).frames[0]
            clock.mark("vae_decode")
            export_to_video(list(frames), str(path), fps=architecture.fps)
            clock.mark("encode_mp4")
        return clock.round(stock_attention(self.request.variant))


class StageClock:
    """Marks the stages of a stock pipeline's call: the end of its encoding, the begin of its decoding."""

    def __init__(self, pipe: Any, device: torch.device) -> None:
        self._pipe = pipe
        self._device = device
        self._meter = peak_meter(device)
        self._seconds: dict[str, float] = {}
        self._peaks: dict[str, int] = {}
        self._steps: list[float] = []
        self._last = self._last_step = 0.0

    def __enter__(self) -> "StageClock":
        encode, decode = self._pipe.encode_prompt, self._pipe.vae.decode

        def encode_prompt(*args: Any, **kwargs: Any) -> Any:
            found = encode(*args, **kwargs)
            self.mark("text_encode")
            return found

        def decode_latents(*args: Any, **kwargs: Any) -> Any:
            self.mark("denoise")
            return decode(*args, **kwargs)

        self._pipe.encode_prompt, self._pipe.vae.decode = encode_prompt, decode_latents
        self._meter.start()
        synchronize(self._device)
        self._last = time.perf_counter()
        return self

    def __exit__(self, *exception: object) -> None:
        del self._pipe.encode_prompt, self._pipe.vae.decode

    def mark(self, stage: str) -> None:
        """The stage ends here, and the next one begins."""
        synchronize(self._device)
        now = self._last_step = time.perf_counter()
        self._seconds[stage], self._last = now - self._last, now
        self._peaks[stage] = self._meter.stop()
        self._meter = peak_meter(self._device)
        self._meter.start()

    def step(self, pipe: object, index: int, timestep: object, tensors: dict[str, Any]) -> dict[str, Any]:
        """The pipeline's callback after each step."""
        synchronize(self._device)
        now = time.perf_counter()
        self._steps.append(now - self._last_step)
        self._last_step = now
        return {}

    def round(self, ran: str) -> Round:
        """What was measured."""
        return Round(
            step_seconds=tuple(self._steps),
            peak_bytes=dict(self._peaks),
            ran=ran,
            job=JobSeconds(total=sum(self._seconds.values()), **self._seconds),
        )


class OurJobBench(JobBench):
    """``run_job`` on the loaded pipeline, as the worker calls it."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._preset = preset_of(request.architecture)
        switches = request.variant.switches
        vae_dtype = torch.float16 if "vae16" in switches else torch.float32
        self.pipe.vae.to(vae_dtype)
        self._loaded = made_ready(
            self.pipe,
            self._preset,
            Precision(self.device, network_dtype(self.device), vae_dtype),
            MemoryOptions(
                offload=request.variant.offload,
                feed_forward_chunks=request.chunks if "chunks" in switches else None,
            ),
            ComputeSettings(
                compile="on" if "compile" in switches else "off",
                precision="fp8" if "fp8" in switches else "full",
            ),
        )

    def run(self, prompt: str, steps: int, path: Path) -> Round:
        self._loaded.texts.clear()  # the same empty negative prompt would be found
        params = job_parameters(self.request, self._preset, prompt, steps)
        seconds: list[float] = []
        start = time.perf_counter()
        last = deque(
            _watched(run_job(self._loaded, params, JobPaths(path), is_cancelled=lambda: False), seconds),
            maxlen=1,
        ).pop()
        total = time.perf_counter() - start
        if not isinstance(last, JobFinished):
            raise RuntimeError(f"a job ended with {last!r}")
        return _round_of(last.result, seconds, total)


def _watched(events: Any, seconds: list[float]) -> Any:
    """The events; times of steps are kept."""
    for event in events:
        if isinstance(event, StepFinished):
            seconds.append(event.seconds)
        yield event


def _round_of(result: JobResult, steps: list[float], total: float) -> Round:
    metrics = result.metrics
    return Round(
        step_seconds=tuple(steps),
        peak_bytes={str(stage): peak for stage, peak in metrics.peak_memory_by_stage.items()},
        ran=_what_ran(result),
        job=JobSeconds(
            total=total,
            text_encode=metrics.text_encode_seconds,
            denoise=metrics.denoise_seconds,
            vae_decode=metrics.vae_decode_seconds,
            encode_mp4=metrics.encode_seconds,
        ),
    )


def _what_ran(result: JobResult) -> str:
    report, memory, compute, decode = result.attention, result.memory, result.compute, result.decode
    said = [
        f"{report.implementation}, density {report.density:.3f}",
        f"{report.sparse_calls} sparse and {report.dense_calls} dense calls",
    ]
    if memory is not None:
        said.append(f"offload {memory.offload}, feed-forward in {memory.feed_forward_chunks}")
    if compute is not None:
        said.append(f"{'compiled' if compute.compiled else 'eager'}, guidance {compute.guidance}")
        said.append(f"linear layers {compute.precision}, attention {report.precision or 'full'}")
    if decode is not None:
        said.append(f"decode {decode.rung}{', fused' if decode.fused else ''}")
    if result.environment is not None:
        said.append(f"VAE in {result.environment.vae_dtype}")
    return "; ".join(said)


def preset_of(architecture: Architecture) -> ModelPreset:
    """A preset that fits the architecture, its size shrunk or not."""
    return ModelPreset(
        name=architecture.preset or architecture.name,
        source="random weights",
        geometry=VideoGeometry(
            vae_spatial=architecture.vae_spatial,
            vae_temporal=architecture.vae_temporal,
            patch=architecture.patch,
        ),
        num_layers=architecture.layers,
        max_sequence_length=architecture.text_tokens,
    )


def job_parameters(request: Request, preset: ModelPreset, prompt: str, steps: int) -> JobParameters:
    """The same job that the stock pipeline runs."""
    architecture = request.architecture
    if request.variant.attention == "dense":
        attention = AttentionConfig(backend="dense")
    else:
        attention = AttentionConfig(
            backend="anchor_local",
            block_size=architecture.block_size,
            anchor_stride=architecture.anchor_stride,
            dense_steps=request.dense_steps,
            min_tokens=0,
            precision="fp8" if "fp8attention" in request.variant.switches else "full",
        )
    return JobParameters(
        model=preset.name,
        prompt=prompt,
        negative_prompt="",
        width=architecture.width,
        height=architecture.height,
        num_frames=architecture.num_frames,
        fps=architecture.fps,
        num_inference_steps=steps,
        guidance_scale=architecture.guidance_scale,
        seed=request.seed,
        attention=attention,
    )
