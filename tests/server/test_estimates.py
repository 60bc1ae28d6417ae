"""ETAs come from measurements or not at all."""

import dataclasses

import pytest

from configs.attention import AttentionConfig
from configs.job import JobParameters
from configs.model_preset import ModelPreset
from server.claims import ClaimTable
from server.clip_cost import ClipCost, clip_cost
from server.estimates import Estimate, estimate, remaining_seconds
from server.job import Job, NewJob
from server.jobs import JobTable
from tests.server.samples import new_job, parameters, result
from tests.server.test_jobs import claim_of, complete_one

PRESET = ModelPreset(name="tiny-wan", source="nowhere", num_layers=2)
DENSE = AttentionConfig(backend="dense")
NOTHING = Estimate(None, None, None, None)


@pytest.fixture
def running(jobs: JobTable, claims: ClaimTable) -> Job:
    """A job that was just claimed."""
    jobs.submit(new_job())
    job = claims.claim("tiny-wan")
    assert job is not None
    return job


def test_nothing_measured_is_unknown(jobs: JobTable, running: Job) -> None:
    assert remaining_seconds(jobs, running) is None


def test_a_first_job_is_measured_by_its_own_steps(jobs: JobTable, running: Job) -> None:
    halfway = dataclasses.replace(running, step=2, steps_run=2, denoise_seconds=6.0)
    assert remaining_seconds(jobs, halfway) == 2 * 3.0


def test_an_earlier_job_of_the_shape_is_better(jobs: JobTable, claims: ClaimTable) -> None:
    complete_one(jobs, claims)
    jobs.submit(new_job())
    job = claims.claim("tiny-wan")
    assert job is not None
    halfway = dataclasses.replace(job, step=2, denoise_seconds=600.0)
    remaining = remaining_seconds(jobs, halfway)
    assert remaining == 2 * 0.5 + 1.0


def test_a_resumed_job_has_fewer_steps_left(jobs: JobTable, claims: ClaimTable, running: Job) -> None:
    resumed = dataclasses.replace(running, checkpoint_step=2, step=0)
    complete_one(jobs, claims)
    assert remaining_seconds(jobs, resumed) == 2 * 0.5 + 1.0


def test_a_resumed_first_job_is_measured_by_the_steps_it_ran(jobs: JobTable, running: Job) -> None:
    resumed = dataclasses.replace(running, checkpoint_step=2, step=3, steps_run=1, denoise_seconds=5.0)
    assert remaining_seconds(jobs, resumed) == 5.0


@pytest.mark.parametrize("jump_seconds", [-7200.0, 7200.0])
def test_a_clock_jump_makes_no_absurd_estimate(
    jump_seconds: float, jobs: JobTable, claims: ClaimTable, running: Job
) -> None:
    complete_one(jobs, claims)
    assert running.started_at is not None
    decoding = dataclasses.replace(
        running, stage="vae_decode", step=4, started_at=running.started_at + jump_seconds
    )
    remaining = remaining_seconds(jobs, decoding)
    assert remaining is not None
    assert 0.0 <= remaining <= 1.0


def clip(frames: int = 9, guidance_scale: float = 1.0, attention: AttentionConfig = DENSE) -> JobParameters:
    """A clip of so many frames, 16 tokens per four."""
    changes = {"num_frames": frames, "guidance_scale": guidance_scale, "attention": attention}
    return parameters().model_copy(update=changes)


def run(
    jobs: JobTable,
    claims: ClaimTable,
    asked: JobParameters,
    *,
    step_seconds: float = 0.5,
    peak_memory_bytes: int = 123,
) -> ClipCost:
    """Complete a job of four steps that takes a second besides, and whose report is that of its clip."""
    cost = clip_cost(asked, PRESET)
    jobs.submit(NewJob(asked, attention_asked=None, metadata={}, request_sha256="f" * 64))
    claim = claim_of(claims.claim("tiny-wan"))
    for step in range(1, 5):
        claims.finish_step(claim, step, step_seconds, progress=step)
    done = result()
    metrics = {"total_seconds": 4 * step_seconds + 1.0, "peak_memory_bytes": peak_memory_bytes}
    report = {"tokens": cost.tokens, "density": cost.density, "sparse_calls": 1, "dense_calls": 0}
    update = {
        "metrics": done.metrics.model_copy(update=metrics),
        "attention": done.attention.model_copy(update=report),
    }
    claims.complete(claim, done.model_copy(update=update))
    return cost


def test_without_history_nothing_is_predicted(jobs: JobTable) -> None:
    assert estimate(jobs, PRESET, clip(), 10**9) == NOTHING


def test_a_shape_that_ran_is_predicted_from_its_own_jobs(jobs: JobTable, claims: ClaimTable) -> None:
    run(jobs, claims, clip())
    assert estimate(jobs, PRESET, clip(), None) == Estimate(3.0, 123, "measured", None)
    assert estimate(jobs, PRESET, clip(), 123) == Estimate(3.0, 123, "measured", True)
    assert estimate(jobs, PRESET, clip(), 122) == Estimate(3.0, 123, "measured", False)
    longer = clip().model_copy(update={"num_inference_steps": 10, "prompt": "another", "seed": 8})
    assert estimate(jobs, PRESET, longer, None).seconds == 10 * 0.5 + 1.0
    run(jobs, claims, clip(), step_seconds=1.5, peak_memory_bytes=200)
    assert estimate(jobs, PRESET, clip(), None) == Estimate(4 * 1.0 + 1.0, 200, "measured", None)


def test_another_models_jobs_predict_nothing(jobs: JobTable, claims: ClaimTable) -> None:
    run(jobs, claims, clip())
    other = clip().model_copy(update={"model": "other-model"})
    assert estimate(jobs, PRESET, other, None) == NOTHING


def test_a_longer_clip_is_scaled_by_tokens_and_pairs(jobs: JobTable, claims: ClaimTable) -> None:
    assert run(jobs, claims, clip(9)).tokens == 48
    # Twice the tokens: half of each step doubles, half grows fourfold; guidance doubles the passes.
    assert clip_cost(clip(21), PRESET).tokens == 96
    assert estimate(jobs, PRESET, clip(21), 10**9) == Estimate(4 * 0.5 * 3 + 2.0, None, "scaled", None)
    guided = estimate(jobs, PRESET, clip(21, guidance_scale=5.0), None)
    assert guided.seconds == 2 * (4 * 0.5 * 3) + 2.0


def test_fewer_pairs_shorten_the_attention_half(jobs: JobTable, claims: ClaimTable) -> None:
    run(jobs, claims, clip())
    sparse = clip(attention=AttentionConfig(block_size=16, anchor_stride=17, dense_steps=0, min_tokens=0))
    share = clip_cost(sparse, PRESET).density
    assert share < 0.6
    assert estimate(jobs, PRESET, sparse, None).seconds == pytest.approx(4 * 0.5 * (1 + share) / 2 + 1.0)


def test_the_nearest_shape_is_scaled_and_memory_follows_the_tokens(
    jobs: JobTable, claims: ClaimTable
) -> None:
    run(jobs, claims, clip(1), step_seconds=100.0, peak_memory_bytes=1_016)  # 16 tokens
    run(jobs, claims, clip(9), peak_memory_bytes=1_048)  # 48 tokens
    found = estimate(jobs, PRESET, clip(21), 1_095)  # 96 tokens
    assert found == Estimate(4 * 0.5 * 3 + 2.0, 1_096, "scaled", False)
    assert estimate(jobs, PRESET, clip(21), 1_096).fits


def test_memory_that_falls_with_the_length_predicts_none(jobs: JobTable, claims: ClaimTable) -> None:
    run(jobs, claims, clip(1), peak_memory_bytes=2_000)
    run(jobs, claims, clip(9), peak_memory_bytes=1_000)
    found = estimate(jobs, PRESET, clip(21), 10**9)
    assert (found.peak_memory_bytes, found.fits, found.basis) == (None, None, "scaled")
