"""When checkpoints are saved, and that none is worth a failed job."""

from pathlib import Path

import pytest
import torch

from configs.job import AttentionReport, CheckpointSaved, JobParameters
from pipelines import LoadedPipeline, checkpointing
from pipelines.checkpointing import CheckpointKeeper, identity_of

ATTENTION = AttentionReport(
    backend="dense", implementation="sdpa", tokens=48, density=1.0, sparse_calls=0, dense_calls=6
)
LATENTS = torch.zeros(1, 4, 3, 2, 2)


class _Scheduler:
    """Keeps what a test gives it."""

    def __init__(self, **state: object) -> None:
        vars(self).update(state)


class _Kept:
    """A keeper, and what it said."""

    def __init__(self, loaded: LoadedPipeline, params: JobParameters, path: Path) -> None:
        self.events: list[CheckpointSaved] = []
        self.warnings: list[str] = []
        self.keeper = CheckpointKeeper(
            loaded,
            params,
            path,
            check_cancel=lambda: None,
            emit=self.events.append,
            warn=self.warnings.append,
        )

    def save(self, step: int, **state: object) -> None:
        self.keeper.save(step, LATENTS, _Scheduler(**state), ATTENTION, ())


@pytest.mark.parametrize(("every", "due"), [(0, [6]), (1, [1, 2, 3, 4, 5, 6]), (2, [2, 4, 6]), (4, [4, 6])])
def test_when_one_is_due(
    loaded: LoadedPipeline, params: JobParameters, tmp_path: Path, every: int, due: list[int]
) -> None:
    params = params.model_copy(update={"num_inference_steps": 6, "checkpoint_every": every})
    keeper = _Kept(loaded, params, tmp_path / "c").keeper
    assert [step for step in range(1, 7) if keeper.is_due(step)] == due


def test_what_was_saved_is_found(loaded: LoadedPipeline, params: JobParameters, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    kept = _Kept(loaded, params, path)
    assert kept.keeper.find() is None
    kept.save(1, order=2)
    assert kept.events == [CheckpointSaved(1, path.stat().st_size)]
    found = _Kept(loaded, params, path).keeper.find()
    assert found is not None
    assert (found.step, found.sampler, found.attention) == (1, {"order": 2}, ATTENTION)
    kept.save(3, order=2)
    found = kept.keeper.find()
    assert found is not None
    assert (found.step, found.sampler) == (3, {})  # no step is left
    assert kept.warnings == []


def test_a_bad_file_is_a_warning(loaded: LoadedPipeline, params: JobParameters, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    path.write_bytes(b"no checkpoint")
    kept = _Kept(loaded, params, path)
    assert kept.keeper.find() is None
    (warning,) = kept.warnings
    assert warning.startswith("the checkpoint was not used, the job began at step 1: it cannot be read (")


def test_files_that_cannot_be_written_are_one_warning(
    loaded: LoadedPipeline, params: JobParameters, tmp_path: Path
) -> None:
    kept = _Kept(loaded, params, tmp_path / "absent/checkpoint.safetensors")
    kept.save(1)
    kept.save(2)
    (warning,) = kept.warnings
    assert warning.startswith("the checkpoint after step 1 could not be written: [Errno 2]")
    assert kept.events == []


def test_a_sampler_that_cannot_be_saved_is_a_warning(
    loaded: LoadedPipeline, params: JobParameters, tmp_path: Path
) -> None:
    kept = _Kept(loaded, params, tmp_path / "c")
    kept.save(1, noise=torch.Generator())
    (warning,) = kept.warnings
    assert warning.endswith("could not be written: the sampler's noise is a Generator, which cannot be saved")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("device", ["cuda:0 (A GPU)", "cuda:7 (A GPU)"])
def test_devices_of_one_kind_are_the_same(
    loaded: LoadedPipeline, params: JobParameters, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    environment = identity_of(loaded, params).environment.model_copy(update={"device": device})
    monkeypatch.setattr(checkpointing, "environment_of", lambda loaded: environment)
    assert identity_of(loaded, params).environment.device == "cuda (A GPU)"
