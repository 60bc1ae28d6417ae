"""Progress as one number."""

from configs.job import STAGES
from server.progress import after_step, at_stage


def test_progress_rises_from_stage_to_stage_and_step_to_step() -> None:
    steps = [after_step(step, 50) for step in range(1, 51)]
    whole = [
        *(at_stage(stage) for stage in STAGES[: STAGES.index("denoise") + 1]),
        *steps,
        *(at_stage(stage) for stage in STAGES[STAGES.index("denoise") + 1 :]),
    ]
    assert whole == sorted(whole)
    assert steps[-1] == at_stage("vae_decode")


def test_a_job_that_is_not_completed_never_shows_100() -> None:
    assert max(at_stage(stage) for stage in STAGES) < 100


def test_denoising_dominates() -> None:
    assert after_step(10, 10) - at_stage("denoise") > 80
