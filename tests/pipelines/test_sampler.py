"""A denoise that goes on in the middle ends where an uninterrupted one does, bit for bit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
)

from configs.job import JobParameters
from pipelines import LoadedPipeline, load_pipeline
from pipelines.checkpoint import read_checkpoint, write_checkpoint
from pipelines.checkpointing import identity_of
from pipelines.sampler import UnknownStateError, continued, take_state
from tests.pipelines.denoising import denoised
from tests.tiny_wan import tiny_preset, write_tiny_wan

FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
SCHEDULERS = {
    "unipc": UniPCMultistepScheduler(**FLOW),
    "unipc3": UniPCMultistepScheduler(**FLOW, solver_order=3),
    "euler": FlowMatchEulerDiscreteScheduler(shift=3.0),
    "dpm": DPMSolverMultistepScheduler(**FLOW),
}


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def long_job(params: JobParameters) -> JobParameters:
    """Six guided steps, of which three are dense."""
    attention = params.attention.model_copy(update={"dense_steps": 3})
    return params.model_copy(
        update={
            "num_inference_steps": 6,
            "attention": attention,
            "guidance_scale": 4.0,
            "negative_prompt": "a black square",
        }
    )


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers' dpm, NumPy 2
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_step_can_be_gone_on_from(
    own_pipeline: LoadedPipeline, long_job: JobParameters, tmp_path: Path, name: str
) -> None:
    own_pipeline.pipe.scheduler = SCHEDULERS[name]
    _assert_resumable(own_pipeline, long_job, tmp_path)


def test_two_transformers_go_on_from_every_step(long_job: JobParameters, tmp_path: Path) -> None:
    folder = write_tiny_wan(tmp_path / "two", two_transformers=True)
    two = load_pipeline(tiny_preset(folder), device="cpu", dtype="float32")
    _assert_resumable(two, long_job, tmp_path)


def _assert_resumable(loaded: LoadedPipeline, params: JobParameters, folder: Path) -> None:
    whole = denoised(loaded, params)
    identity, path = identity_of(loaded, params), folder / "checkpoint.safetensors"
    assert [checkpoint.step for checkpoint in whole.checkpoints] == [1, 2, 3, 4, 5]
    for checkpoint in whole.checkpoints:
        write_checkpoint(checkpoint, identity, path, before_chunk=lambda: None)
        resume = read_checkpoint(path, identity, loaded.device)
        assert resume is not None
        rest = denoised(loaded, params, resume=resume)
        assert torch.equal(rest.latents, whole.latents)
        assert [event.step for event in rest.events] == list(range(checkpoint.step + 1, 7))
        assert rest.attention == whole.attention
    assert whole.attention.dense_reasons == {"dense_steps": 3 * 2 * 2}


def test_latents_alone_do_not_say_how_the_next_step_goes(
    own_pipeline: LoadedPipeline, long_job: JobParameters
) -> None:
    """Held against the state being of no matter: a sampler that begins anew ends elsewhere."""
    whole = denoised(own_pipeline, long_job)
    middle = whole.checkpoints[2]
    fresh = {name: middle.sampler[name] for name in ("sigmas", "timesteps", "_step_index")}
    without = type(middle)(middle.step, middle.latents, fresh, middle.attention, ())
    assert not torch.equal(denoised(own_pipeline, long_job, resume=without).latents, whole.latents)


def test_the_scheduler_is_in_its_place_afterwards(own_pipeline: LoadedPipeline) -> None:
    pipe = own_pipeline.pipe
    scheduler, configuration = pipe.scheduler, pipe.config["scheduler"]
    with pytest.raises(ZeroDivisionError), continued(pipe, 1, {}):
        _ = 1 / 0
    assert pipe.scheduler is scheduler
    assert pipe.config["scheduler"] == configuration


def test_a_loop_that_sets_no_begin_index_is_refused(own_pipeline: LoadedPipeline) -> None:
    pipe = own_pipeline.pipe
    with continued(pipe, 1, {}):
        pipe.scheduler.set_timesteps(3)
        assert len(pipe.scheduler.timesteps) == 2
        with pytest.raises(RuntimeError, match="sets no begin index"):
            pipe.scheduler.step(torch.zeros(1), pipe.scheduler.timesteps[0], torch.zeros(1))


def test_the_state_is_a_copy() -> None:
    scheduler: Any = SCHEDULERS["unipc"]
    scheduler.set_timesteps(4)
    state = take_state(scheduler)
    scheduler.sigmas.zero_()
    assert state["sigmas"].any()


def test_what_cannot_be_saved_is_named() -> None:
    scheduler: Any = UniPCMultistepScheduler(**FLOW, solver_p=DPMSolverMultistepScheduler())
    with pytest.raises(UnknownStateError, match="solver_p is a DPMSolverMultistepScheduler"):
        take_state(scheduler)
