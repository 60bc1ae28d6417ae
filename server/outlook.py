"""What a submission would become and take: the answer of ``POST /v1/videos/estimate``.

Knows: how the parts that know are asked. Does not know: arithmetic, SQL or HTTP.
"""

from collections.abc import Mapping

from configs.job import JobParameters
from configs.model_preset import ModelPreset
from configs.prompt_length import TokenizerNotFoundError, cut_text, cut_words
from server.capacity import Capacity, what_is_missing
from server.clip_cost import clip_cost
from server.estimates import Estimate, estimate
from server.schemas import FittingClip, RerunRequest, VideoEstimate, VideoRequest
from server.services import Services
from server.submission import capacity_for, length_warnings, resolve_request
from server.timetable import Timetable

_GIB = 2**30


def outlook(services: Services, request: VideoRequest | RerunRequest) -> VideoEstimate:
    """Resolve the request as a submission would, and predict. Raises ApiError."""
    parameters, preset = resolve_request(services, request), services.preset
    worker = services.worker()
    memory = worker.memory_total_bytes if worker else None
    room = capacity_for(services, parameters)
    found = estimate(services.jobs, preset, parameters, memory, room)
    cost = clip_cost(parameters, preset)
    staff, gpus = services.staff(), services.jobs.gpus
    table = Timetable(services.jobs, parameters.model, staff)
    frames, fps, steps = parameters.num_frames, parameters.fps, parameters.num_inference_steps
    is_guided = parameters.guidance_scale > 1.0
    is_sparse = parameters.attention.backend != "dense"
    texts = {"prompt": parameters.prompt} | (
        {"negative_prompt": parameters.negative_prompt} if is_guided else {}
    )
    return VideoEstimate(
        model=parameters.model,
        size=f"{parameters.width}x{parameters.height}",
        num_frames=frames,
        fps=fps,
        seconds=f"{frames / fps:g}",
        num_inference_steps=steps,
        guidance_scale=parameters.guidance_scale,
        seed=request.seed if isinstance(request, VideoRequest) else parameters.seed,
        token_grid=preset.geometry.token_grid(parameters.width, parameters.height, frames),
        tokens=cost.tokens,
        attention=parameters.attention,
        density=cost.sparse_density,
        mean_density=cost.density,
        dense_steps=parameters.attention.dense_step_count(steps) if is_sparse else steps,
        cut_words=_cut_words(preset, texts),
        predicted_seconds=_rounded(found.seconds),
        predicted_peak_memory_bytes=found.peak_memory_bytes,
        basis=found.basis,
        memory_total_bytes=memory,
        fits=found.fits,
        fits_reason=_fits_reason(found, memory, room, parameters),
        offload=room.fit.offload if room else None,
        predicted_peak_memory_by_stage=room.fit.peaks if room else None,
        peak_memory_error=room.error if room else None,
        would_fit=[
            FittingClip(size=f"{clip.width}x{clip.height}", num_frames=clip.num_frames)
            for clip in (room.would_fit if room else ())
        ],
        queue_position=table.place_of_next(request.priority, gpus),
        starts_in_seconds=_rounded(table.start_of_next(request.priority, gpus)),
        warnings=[
            *length_warnings(request, parameters),
            *_warnings(services, request, is_guided=is_guided),
            *filter(None, [staff.waiting_reason(parameters.model, gpus)]),
            *_cut_warnings(preset, texts),
        ],
    )


def _warnings(services: Services, request: VideoRequest | RerunRequest, *, is_guided: bool) -> list[str]:
    found = []
    if isinstance(request, VideoRequest) and request.negative_prompt and not is_guided:
        found.append("negative_prompt has no effect: guidance_scale is not above 1")
    if services.supervisor.is_stopping:
        found.append("the server is stopping and takes no jobs")
    return found


def _cut_words(preset: ModelPreset, texts: Mapping[str, str]) -> dict[str, list[str]] | None:
    try:
        return {field: cut_text(preset, text).split() for field, text in texts.items()}
    except TokenizerNotFoundError:
        return None


def _cut_warnings(preset: ModelPreset, texts: Mapping[str, str]) -> list[str]:
    try:
        found = [cut_words(preset, field, text) for field, text in texts.items()]
    except TokenizerNotFoundError as error:
        return [f"whether the prompt is too long is not known: {error}"]
    return [warning for warning in found if warning is not None]


def _fits_reason(
    found: Estimate, memory: int | None, room: Capacity | None, parameters: JobParameters
) -> str:
    peak = found.peak_memory_bytes
    if room is not None and not room.fits:
        return what_is_missing(room, parameters)
    if found.basis is None and peak is None:
        return "no job of this model has run here yet"
    if peak is None:
        return "too few lengths have run here to tell how memory grows"
    shown = f"a peak of {peak / _GIB:.2f} GiB is predicted"
    if memory is None:
        return f"{shown}; the memory of the device is not known"
    return f"{shown}; the device has {memory / _GIB:.2f} GiB"


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 2)
