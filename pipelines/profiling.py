"""Where the time of one denoise step goes, by torch's profiler.

Knows: what profiler events say, and which operators are attention, matrix products or elementwise. Does not
know: files or pictures (pipelines/profile_picture.py). On a GPU the times are those of its kernels; on a CPU
those of operators, without what they call.
"""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from configs.compute import ComputeReport
from configs.job import AttentionReport, JobParameters, MemoryReport
from pipelines.cancel import CancelFlag
from pipelines.denoise import synchronize
from pipelines.loading import LoadedPipeline
from pipelines.making import Making
from pipelines.memory import peak_meter
from pipelines.stages import StageRecorder

Kind = Literal["attention", "linear", "elementwise", "other"]
KINDS: tuple[Kind, ...] = ("attention", "linear", "elementwise", "other")
TOP = 30
# One step to warm up, one to look at, and one that lets the loop go on past it.
STEPS = 3
_MICRO = 1e-6
# Parts of names, the first that is found decides. An operator speaks for all that it calls.
_OPERATORS: tuple[tuple[Kind, tuple[str, ...]], ...] = (
    ("attention", ("attention", "sparse_attn", "flash", "efficient_attention")),
    ("linear", ("aten::linear", "aten::addmm", "aten::mm", "aten::bmm", "aten::matmul", "aten::_scaled_mm")),
)
_KERNELS: tuple[tuple[Kind, tuple[str, ...]], ...] = (
    ("attention", ("attention", "attn", "flash", "fmha", "sdpa", "anchor", "window_sink", "block_topk")),
    ("linear", ("gemm", "nvjet", "cutlass", "cublas", "xmma", "_mm", "linear")),
    (
        "elementwise",
        (
            *(
                "triton_",
                "elementwise",
                "vectorized",
                "reduce",
                "norm",
                "quantise",
                "copy",
                "memcpy",
                "memset",
                "cat",
            ),
            *("fill", "aten::mul", "aten::add", "aten::sub", "aten::div", "aten::neg", "aten::pow"),
            *(
                "aten::rsqrt",
                "aten::mean",
                "aten::sum",
                "aten::gelu",
                "aten::silu",
                "aten::to",
                "aten::index",
            ),
            *("aten::empty", "aten::abs", "aten::eq", "aten::ne", "aten::all", "aten::clone", "aten::clamp"),
        ),
    ),
)


class Entry(BaseModel):
    """All calls of one kernel or operator in the step."""

    model_config = ConfigDict(frozen=True)

    name: str
    kind: Kind
    seconds: float
    calls: int


class StepProfile(BaseModel):
    """One warm denoise step."""

    model_config = ConfigDict(frozen=True)

    model: str
    device: str
    dtype: str
    width: int
    height: int
    num_frames: int
    tokens: int
    attention: AttentionReport
    memory: MemoryReport
    compute: ComputeReport
    seconds: float = Field(description="Of the step after it, which ran without the profiler.")
    kernel_seconds: float = Field(description="Sum of what follows; beside the step's time, what was idle.")
    seconds_by_kind: dict[Kind, float]
    peak_memory_bytes: int
    top: list[Entry]


def profile_step(loaded: LoadedPipeline, params: JobParameters) -> StepProfile:
    """Run three steps of the job, and look at the second. Nothing is sparse or dense but as the job says."""
    attention = params.attention.model_copy(update={"dense_steps": 0.0})
    params = params.model_copy(update={"num_inference_steps": STEPS, "attention": attention})
    stages = StageRecorder(loaded.device, lambda event: None)
    never = CancelFlag(lambda: False)
    making = Making(loaded, params, None, 0.0, never, lambda event: None, stages)
    step = _Step(loaded.device)
    report, seconds = making.watched(step)
    return StepProfile(
        model=params.model,
        device=_device_name(loaded.device),
        dtype=str(loaded.dtype).removeprefix("torch."),
        width=params.width,
        height=params.height,
        num_frames=params.num_frames,
        tokens=report.tokens,
        attention=report,
        memory=making.memory,
        compute=making.compute,
        seconds=seconds[-1],
        kernel_seconds=sum(entry.seconds for entry in step.entries),
        seconds_by_kind={
            kind: sum(entry.seconds for entry in step.entries if entry.kind == kind) for kind in KINDS
        },
        peak_memory_bytes=step.peak_memory_bytes,
        top=sorted(step.entries, key=lambda entry: -entry.seconds)[:TOP],
    )


class _Step:
    """Called after each step but the last: looks at the second."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile: Any = profile(activities=activities)
        self._meter = peak_meter(device)
        self.peak_memory_bytes = 0
        self.entries: list[Entry] = []

    def __call__(self, step: int, latents: torch.Tensor) -> None:
        if step == 1:
            self._meter.start()
            self._profile.start()
        elif step == 2:
            synchronize(self._device)
            self._profile.stop()
            self.peak_memory_bytes = self._meter.stop()
            self.entries = entries(self._profile.events(), on_gpu=self._device.type == "cuda")


def entries(events: Any, *, on_gpu: bool) -> list[Entry]:
    """Profiler events -> one entry for each kernel (on a GPU) or operator."""
    seconds: defaultdict[tuple[str, Kind], float] = defaultdict(float)
    calls: defaultdict[tuple[str, Kind], int] = defaultdict(int)

    def add(name: str, kind: Kind, microseconds: float) -> None:
        seconds[name, kind] += microseconds * _MICRO
        calls[name, kind] += 1

    if on_gpu:
        kinds = {
            kernel.name: kind
            for event in events
            for kernel in event.kernels
            if (kind := _kind_of_operator(event)) is not None
        }
        for event in events:
            if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
                add(event.name, kinds.get(event.name) or _kind_of_kernel(event.name), event.device_time_total)
    else:
        for event in events:
            kind = _kind_of_operator(event) or _kind_of_kernel(event.name)
            add(event.name, kind, event.self_cpu_time_total)
    return [
        Entry(name=name, kind=kind, seconds=total, calls=calls[name, kind])
        for (name, kind), total in seconds.items()
    ]


def _kind_of_operator(event: Any) -> Kind | None:
    """By the operator that called it, the outermost that says something first."""
    found = None
    while event is not None:
        found = _first(event.name, _OPERATORS) or found
        event = event.cpu_parent
    return found


def _kind_of_kernel(name: str) -> Kind:
    return _first(name.lower(), _KERNELS) or "other"


def _first(name: str, kinds: tuple[tuple[Kind, tuple[str, ...]], ...]) -> Kind | None:
    return next((kind for kind, parts in kinds if any(part in name for part in parts)), None)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def write_profile(found: StepProfile, path: Path, draw: Callable[[StepProfile], str]) -> Path:
    """The JSON at ``path``, and the picture beside it, whose path is returned."""
    path.write_text(found.model_dump_json(indent=2) + "\n", encoding="utf-8")
    picture = path.with_suffix(".svg")
    picture.write_text(draw(found), encoding="utf-8")
    return picture
