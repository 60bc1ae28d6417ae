"""From what a caller asked for to what will run: defaults filled in, everything checked, nothing rounded."""

import re
import secrets
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from configs.attention import AttentionConfig, AttentionOverrides
from configs.compute import StepCache
from configs.geometry import GeometryError
from configs.job import MAX_SEED, JobParameters
from configs.model_preset import ModelPreset

MAX_PROMPT_CHARACTERS = 10_000


def _checked_size(size: str) -> str:
    if re.fullmatch(r"[1-9][0-9]{0,4}x[1-9][0-9]{0,4}", size) is None:
        raise ValueError(f"size {size!r:.40} is not WIDTHxHEIGHT in pixels, such as 832x480")
    return size


def _without_nul(text: str) -> str:
    # It ends a string for half of the programs that a prompt meets.
    if "\0" in text:
        raise ValueError("must not contain the character U+0000")
    return text


WITHOUT_NUL = AfterValidator(_without_nul)


class GenerationRequest(BaseModel):
    """The part of a request that decides the clip; None means: the model's default."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_CHARACTERS), WITHOUT_NUL]
    negative_prompt: Annotated[str, Field(max_length=MAX_PROMPT_CHARACTERS), WITHOUT_NUL] | None = None
    size: Annotated[str, AfterValidator(_checked_size)] | None = None
    seconds: Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)] | None = None
    num_frames: Annotated[int, Field(ge=1, le=100_000)] | None = None
    fps: Annotated[int, Field(ge=1, le=120)] | None = None
    num_inference_steps: Annotated[int, Field(ge=1)] | None = None
    guidance_scale: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    attention: AttentionOverrides | None = None
    step_cache: StepCache | None = None


class RequestError(ValueError):
    """A request that cannot run. ``field`` names what to change."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def resolve(
    request: GenerationRequest, preset: ModelPreset, base_attention: AttentionConfig
) -> JobParameters:
    """Fill in defaults and check every value against the model.

    Raises:
        RequestError: names the field, its value and the nearest valid values.
    """
    defaults, limits, geometry = preset.defaults, preset.limits, preset.geometry
    width, height = _size(request, preset)
    fps = request.fps or defaults.fps
    num_frames = _num_frames(request, preset, fps)
    try:
        geometry.check_side("width", width)
        geometry.check_side("height", height)
        geometry.check_frames(num_frames)
    except GeometryError as error:
        raise RequestError(error.field, str(error)) from error
    steps = request.num_inference_steps or defaults.num_inference_steps
    _at_most("num_inference_steps", steps, limits.max_num_inference_steps)
    guidance = defaults.guidance_scale if request.guidance_scale is None else request.guidance_scale
    negative = defaults.negative_prompt if request.negative_prompt is None else request.negative_prompt
    _at_most("guidance_scale", guidance, limits.max_guidance_scale)
    if not request.prompt.strip():
        raise RequestError("prompt", "prompt is blank; say what the clip should show")
    grid = geometry.token_grid(width, height, num_frames)
    try:
        attention = (request.attention or AttentionOverrides()).over(base_attention).resolved(grid)
    except ValueError as error:
        raise RequestError("attention", _first_message(error)) from error
    _check_layers(attention, preset)
    step_cache = request.step_cache or defaults.step_cache
    _check_step_cache(step_cache, attention)
    return JobParameters(
        model=preset.name,
        prompt=request.prompt,
        negative_prompt=negative,
        width=width,
        height=height,
        num_frames=num_frames,
        fps=fps,
        num_inference_steps=steps,
        guidance_scale=guidance,
        seed=secrets.randbelow(MAX_SEED + 1) if request.seed is None else request.seed,
        attention=attention,
        step_cache=step_cache,
    )


def _check_layers(attention: AttentionConfig, preset: ModelPreset) -> None:
    if preset.num_layers is None:
        return  # then the model says so itself, once it is loaded
    beyond = [layer for layer in attention.dense_layers if layer >= preset.num_layers]
    if beyond:
        raise RequestError(
            "attention.dense_layers",
            f"dense_layers names {beyond}, but {preset.name} has layers 0 to {preset.num_layers - 1}",
        )


def _check_step_cache(step_cache: StepCache, attention: AttentionConfig) -> None:
    if step_cache != "off" and attention.backend == "anchor_local" and attention.anchor_rotation:
        raise RequestError(
            "step_cache",
            f"step_cache {step_cache} reuses what earlier steps computed, and attention.anchor_rotation "
            "changes the order of tokens between steps; use one of the two",
        )


def _size(request: GenerationRequest, preset: ModelPreset) -> tuple[int, int]:
    if request.size is None:
        return preset.defaults.width, preset.defaults.height
    width, height = (int(side) for side in request.size.split("x"))
    low, high = preset.limits.min_side, preset.limits.max_side
    for name, side in (("width", width), ("height", height)):
        if not low <= side <= high:
            raise RequestError("size", f"{name} {side} is outside {low} to {high} for {preset.name}")
    return width, height


def _num_frames(request: GenerationRequest, preset: ModelPreset, fps: int) -> int:
    if request.seconds is not None and request.num_frames is not None:
        raise RequestError("num_frames", "give either seconds or num_frames, not both")
    longest = preset.limits.max_num_frames
    if request.seconds is not None:
        num_frames = preset.geometry.frames_for_seconds(request.seconds, fps)
        if num_frames > longest:
            raise RequestError(
                "seconds",
                f"seconds {request.seconds:g} at {fps} fps is {num_frames} frames; {preset.name} makes "
                f"at most {longest} ({longest / fps:.2f} s)",
            )
        return num_frames
    num_frames = request.num_frames or preset.defaults.num_frames
    _at_most("num_frames", num_frames, longest)
    return num_frames


def _at_most(field: str, value: float, limit: float) -> None:
    if value > limit:
        raise RequestError(field, f"{field} {_shown(value)} is above the limit of {_shown(limit)}")


def _shown(value: float) -> str:
    """Short, for an integer of any length too, which no float can hold."""
    text = str(value) if isinstance(value, int) else f"{value:g}"
    return text if len(text) <= 20 else f"{text[:17]}..."


def _first_message(error: ValueError) -> str:
    errors = getattr(error, "errors", None)
    if errors is None:
        return str(error)
    return str(errors()[0]["msg"]).removeprefix("Value error, ")
