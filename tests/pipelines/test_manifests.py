"""What is said of the environment of a job."""

import dataclasses
import os
from pathlib import Path

import diffusers
import pytest
import torch
import transformers

from configs.job import RunEnvironment
from configs.model_preset import ModelPreset
from pipelines import LoadedPipeline, load_pipeline
from pipelines.manifests import environment_of, snapshot_commit

COMMIT = "0fad780a534b6463e45facd96134c9f345acfa5b"


def test_everything_is_what_was_loaded(loaded: LoadedPipeline, tiny_folder: Path) -> None:
    environment = environment_of(loaded)
    versions = environment.versions
    assert environment == RunEnvironment(
        source=str(tiny_folder),
        revision=None,
        pipeline="WanPipeline",
        scheduler="UniPCMultistepScheduler",
        device="cpu",
        dtype="float32",
        vae_dtype="float32",
        versions=versions,
    )
    assert versions["torch"] == torch.__version__
    assert versions["diffusers"] == diffusers.__version__
    assert versions["transformers"] == transformers.__version__
    assert versions["reelwright"]


def test_number_formats_are_told_apart(loaded: LoadedPipeline) -> None:
    half = dataclasses.replace(loaded, dtype=torch.bfloat16)
    assert (environment_of(half).dtype, environment_of(half).vae_dtype) == ("bfloat16", "float32")


def test_a_hub_snapshot_is_named_by_its_commit(
    tiny_folder: Path, tmp_path: Path, preset: ModelPreset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder lies as the hub's cache lays it out, and is loaded through the cache without a network."""
    repository = tmp_path / "models--someone--tiny"
    (repository / "snapshots").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(COMMIT)
    os.symlink(tiny_folder, repository / "snapshots" / COMMIT, target_is_directory=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub = preset.model_copy(update={"source": "someone/tiny", "revision": "main"})
    environment = environment_of(load_pipeline(hub, device="cpu", dtype="float32"))
    assert (environment.source, environment.revision) == ("someone/tiny", COMMIT)


def test_without_a_commit_the_presets_revision_is_told(loaded: LoadedPipeline) -> None:
    tagged = dataclasses.replace(loaded, preset=loaded.preset.model_copy(update={"revision": "v1"}))
    assert environment_of(tagged).revision == "v1"


@pytest.mark.parametrize(
    ("folder", "commit"),
    [
        (f"/c/models--a--b/snapshots/{COMMIT}", COMMIT),
        (f"/c/{COMMIT}", None),
        ("/c/snapshots/main", None),
        (f"/c/snapshots/{COMMIT}0", None),
    ],
)
def test_only_a_snapshot_has_a_commit(folder: str, commit: str | None) -> None:
    assert snapshot_commit(Path(folder)) == commit
