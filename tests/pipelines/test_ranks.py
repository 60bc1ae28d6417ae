"""Whole jobs of the bundled model on 2 and 4 ranks: as one rank's, cancelled, resumed, failed, killed."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from configs.job import JobFailedError, JobParameters, JobPaths
from configs.model_preset import find_model
from configs.resolve import GenerationRequest, resolve
from pipelines import LoadedPipeline, load_pipeline, run_job
from pipelines.ranks import BROKEN_EXIT_CODE, load_on_ranks
from tests.faults.processes import is_dead, wait_until
from tests.pipelines.rank_driver import MODEL

# Processes that wait for each other, and one test kills one of them.
# A start of four ranks loads PyTorch four times, which takes minutes on a slow machine.
pytestmark = [pytest.mark.alone, pytest.mark.timeout(900)]
REPOSITORY = Path(__file__).parents[2]
STEPS = 4


class Driver:
    """Rank 0 and its followers."""

    def __init__(self, ranks: int, folder: Path) -> None:
        self.folder = folder
        self.armed = folder / "armed"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.pipelines.rank_driver", str(ranks), str(self.armed)],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pids: list[int] = self.next()["pids"]

    def next(self) -> dict[str, Any]:
        """The next thing that it says; {} if it has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        said: dict[str, Any] = json.loads(line) if line else {}
        return said

    def start(self, name: str, params: JobParameters, cancel_after: int | None = None) -> Path:
        """Begin a job; its checkpoint."""
        assert self.process.stdin is not None
        checkpoint = self.folder / f"{name}.safetensors"
        job = {
            "params": params.model_dump(mode="json"),
            "video": str(self.folder / f"{name}.mp4"),
            "checkpoint": str(checkpoint),
            "cancel_after": cancel_after,
        }
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return checkpoint

    def run(self, name: str, params: JobParameters, cancel_after: int | None = None) -> dict[str, Any]:
        """What a job ends with, and the ``latents`` of its checkpoint, if there is one."""
        checkpoint = self.start(name, params, cancel_after)
        while "step" in (said := self.next()):
            pass
        if checkpoint.exists():
            said["latents"] = load_file(checkpoint)["latents"]
        return said

    def close(self) -> int:
        """End rank 0 in order; its exit code."""
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        return self.process.wait(60)


def has_ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists() or is_dead(pid)


def drive(ranks: int, folder: Path) -> Iterator[Driver]:
    driver = Driver(ranks, folder)
    yield driver
    driver.close()
    for pid in driver.pids:
        wait_until(partial(has_ended, pid), "the followers ended")


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    yield from drive(4, tmp_path_factory.mktemp("four"))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    yield from drive(2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def alone() -> LoadedPipeline:
    return load_pipeline(find_model(MODEL), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def job() -> JobParameters:
    """One dense step and three sparse ones over 3 x 8 x 10 tokens, saved after each."""
    preset = find_model(MODEL)
    request = GenerationRequest(
        prompt="a red circle moving left quickly on a white background",
        size="80x64",
        num_frames=9,
        num_inference_steps=STEPS,
        seed=3,
    )
    params = resolve(request, preset, preset.attention)
    attention = params.attention.model_copy(update={"dense_steps": 1, "min_tokens": 0, "block_size": 50})
    return params.model_copy(update={"attention": attention, "checkpoint_every": 1})


@pytest.fixture(scope="module")
def guided(job: JobParameters) -> JobParameters:
    return job.model_copy(update={"guidance_scale": 3.0, "negative_prompt": "a blue square"})


def latents_alone(loaded: LoadedPipeline, params: JobParameters, folder: Path) -> torch.Tensor:
    checkpoint = folder / "alone.safetensors"
    paths = JobPaths(folder / "alone.mp4", checkpoint=checkpoint)
    list(run_job(loaded, params, paths, is_cancelled=lambda: False))
    return load_file(checkpoint)["latents"]


def assert_equal(said: dict[str, Any], expected: torch.Tensor) -> None:
    """Relative to all of the latents: every step adds its rounding to that of those before.

    Measured against a float64 transformer: one rank is off by 2.3e-6 of the norm, four ranks by 1.9e-6.
    """
    error = (said["latents"] - expected).norm() / expected.norm()
    assert error < 1e-5


def test_four_ranks_share_the_tokens(
    four: Driver, alone: LoadedPipeline, job: JobParameters, tmp_path: Path
) -> None:
    said = four.run("shared", job)
    assert_equal(said, latents_alone(alone, job, tmp_path))
    attention = said["result"]["attention"]
    assert (attention["sparse_calls"], attention["dense_calls"]) == (8 * (STEPS - 1), 8)
    parallel = attention["parallel"]
    assert (parallel["ranks"], parallel["token_ranks"], parallel["guidance"]) == (4, 4, None)
    assert parallel["sparse_exchange"] == "anchors"
    assert 0 < parallel["sparse_call_bytes"] < parallel["dense_call_bytes"]


def test_guidance_is_split_between_halves(
    four: Driver, alone: LoadedPipeline, guided: JobParameters, tmp_path: Path
) -> None:
    said = four.run("guided", guided)
    assert_equal(said, latents_alone(alone, guided, tmp_path))
    parallel = said["result"]["attention"]["parallel"]
    assert (parallel["ranks"], parallel["token_ranks"], parallel["guidance"]) == (4, 2, "split")


def test_a_cancelled_job_stops_at_a_step_and_goes_on_from_there(
    four: Driver, alone: LoadedPipeline, job: JobParameters, tmp_path: Path
) -> None:
    assert four.run("stopped", job, cancel_after=2)["cancelled"] == 2
    said = four.run("stopped", job)
    assert said["result"]["resumed_from_step"] == 1
    assert_equal(said, latents_alone(alone, job, tmp_path))


def test_a_step_cache_is_refused_where_tokens_are_shared(four: Driver, job: JobParameters) -> None:
    said = four.run("cached", job.model_copy(update={"step_cache": "first_block"}))
    assert said["code"] == "invalid_input"
    assert "step_cache first_block cannot be used where 4 ranks share a clip's tokens" in said["failed"]
    assert said["broken"] is None


def test_two_ranks_compute_a_pass_each(
    two: Driver, alone: LoadedPipeline, guided: JobParameters, tmp_path: Path
) -> None:
    said = two.run("guided", guided)
    torch.testing.assert_close(said["latents"], latents_alone(alone, guided, tmp_path), rtol=0, atol=0)
    parallel = said["result"]["attention"]["parallel"]
    assert (parallel["token_ranks"], parallel["guidance"], parallel["sparse_call_bytes"]) == (1, "split", 0)


def test_a_failure_inside_a_followers_step_fails_the_job(four: Driver, job: JobParameters) -> None:
    """The last one of these ranks."""
    four.armed.write_text("2", encoding="utf-8")
    said = four.run("armed", job)
    assert said["failed"].startswith("rank 2: RuntimeError in denoise for 9 frames of 80x64 on cpu: armed")
    assert said["code"] == "internal"
    assert said["broken"] is not None
    assert "the ranks are broken" in four.run("later", job)["failed"]
    assert four.close() == 0


def test_a_killed_follower_ends_rank_0(two: Driver, job: JobParameters) -> None:
    """The last one of these ranks."""
    many = job.model_copy(update={"num_inference_steps": 100})
    two.start("killed", many)
    while two.next()["step"] < 2:
        pass
    os.kill(two.pids[0], signal.SIGKILL)
    said = two.next()
    while "step" in said:
        said = two.next()
    assert said == {"on_broken": "rank 1 died"}
    assert two.process.wait(60) == BROKEN_EXIT_CODE


def test_ranks_that_do_not_fit_the_model_are_refused() -> None:
    with pytest.raises(
        JobFailedError, match=r"4 attention heads, which 3 ranks .* ranks that fit: 1, 2, 4"
    ) as caught:
        load_on_ranks(find_model(MODEL), ranks=3, device="cpu", dtype="float32", on_broken=print)
    assert caught.value.code == "model_load_failed"
