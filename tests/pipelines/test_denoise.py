"""Latents against the stock pipeline, step events, and which steps are dense."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs.attention import AttentionConfig
from configs.job import JobCancelledError, JobFailedError, JobParameters, StepFinished
from pipelines import LoadedPipeline
from pipelines.attending import swapped
from pipelines.cancel import CancelFlag
from pipelines.denoise import StepWatch, denoise, step_seconds
from pipelines.text import encode_text
from tests.pipelines.stock import stock_output


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def _denoise(
    loaded: LoadedPipeline, params: JobParameters, flag: CancelFlag | None = None
) -> tuple[torch.Tensor, list[StepFinished], dict[str, int]]:
    """Latents, events, and dense calls by reason."""
    events: list[StepFinished] = []
    with swapped(loaded, params) as handle:
        watch = StepWatch(loaded.device, params, handle, flag or CancelFlag(lambda: False), events.append)
        latents = denoise(loaded, params, encode_text(loaded, params), watch)
        return latents, events, dict(handle.report().dense_reasons)


@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0])
@pytest.mark.parametrize("shape", [(64, 64, 9), (48, 80, 1), (96, 64, 5)])
def test_dense_latents_are_the_stock_pipelines(
    loaded: LoadedPipeline, params: JobParameters, scale: float, shape: tuple[int, int, int]
) -> None:
    width, height, num_frames = shape
    params = params.model_copy(
        update={
            "attention": AttentionConfig(backend="dense"),
            "guidance_scale": scale,
            "negative_prompt": "a black square",
            "width": width,
            "height": height,
            "num_frames": num_frames,
        }
    )
    latents, _, _ = _denoise(loaded, params)
    torch.testing.assert_close(latents, stock_output(loaded, params, "latent"), rtol=0, atol=0)


def test_sparse_attention_changes_the_latents(loaded: LoadedPipeline, params: JobParameters) -> None:
    latents, _, _ = _denoise(loaded, params)
    assert not torch.allclose(latents, stock_output(loaded, params, "latent"))


def test_the_seed_decides(loaded: LoadedPipeline, params: JobParameters) -> None:
    first, again, other = (
        _denoise(loaded, params.model_copy(update={"seed": seed}))[0] for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_one_event_a_step(loaded: LoadedPipeline, params: JobParameters) -> None:
    _, events, _ = _denoise(loaded, params.model_copy(update={"num_inference_steps": 4}))
    assert [(event.step, event.total_steps) for event in events] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert all(event.seconds > 0 for event in events)


@pytest.mark.parametrize(
    ("dense_steps", "calls"), [(0, 0), (0.2, 2), (0.5, 4), (1, 2), (3, 6), (50, 6)], ids=str
)
def test_leading_steps_run_dense(
    loaded: LoadedPipeline, params: JobParameters, dense_steps: float, calls: int
) -> None:
    setting = params.attention.model_copy(update={"dense_steps": dense_steps})
    _, _, reasons = _denoise(loaded, params.model_copy(update={"attention": setting}))
    assert reasons.get("dense_steps", 0) == calls  # 3 steps of 2 layers


def test_the_first_step_is_the_dense_one(loaded: LoadedPipeline, params: JobParameters) -> None:
    one_step = params.model_copy(update={"num_inference_steps": 1})
    setting = params.attention.model_copy(update={"dense_steps": 1})
    latents, _, _ = _denoise(loaded, one_step.model_copy(update={"attention": setting}))
    assert torch.equal(latents, stock_output(loaded, one_step, "latent"))


def test_anchors_that_rotate_change_the_clip(loaded: LoadedPipeline, params: JobParameters) -> None:
    """Each step has an offset of its own, the first one that of the setting."""
    still = params.attention.model_copy(
        update={"dense_steps": 0, "block_size": 5, "anchor_stride": 7, "anchor_offset": 6}
    )
    turning = still.model_copy(update={"anchor_rotation": True})
    for steps, same in ((1, True), (2, False)):
        job = params.model_copy(update={"num_inference_steps": steps})
        clips = [
            _denoise(loaded, job.model_copy(update={"attention": setting}))[0] for setting in (still, turning)
        ]
        assert torch.equal(*clips) == same


def test_cancel_between_steps(loaded: LoadedPipeline, params: JobParameters) -> None:
    answers = iter([False, True])
    with pytest.raises(JobCancelledError):
        _denoise(loaded, params, CancelFlag(lambda: next(answers)))
    assert next(answers, None) is None


def test_latents_that_are_not_finite_stop_the_job_at_that_step(
    own_pipeline: LoadedPipeline, params: JobParameters
) -> None:
    own_pipeline.pipe.transformer.proj_out.bias.fill_(float("nan"))
    with pytest.raises(JobFailedError, match=r"latents after step 1 of 3: .* are NaN or infinite") as caught:
        _denoise(own_pipeline, params)
    assert caught.value.code == "bad_output"


@given(st.lists(st.floats(0.001, 100), min_size=1, max_size=60))
def test_step_seconds_are_order_statistics(seconds: list[float]) -> None:
    summary = step_seconds(seconds)
    assert summary is not None
    assert summary.median == pytest.approx(float(np.median(seconds)))
    assert summary.max == max(seconds)
    assert summary.p95 == sorted(seconds)[math.ceil(0.95 * len(seconds)) - 1]
