"""Loading: devices and dtypes, broken models, geometry, the hub's cache, concurrency."""

import shutil
import threading
from pathlib import Path

import diffusers
import huggingface_hub.constants
import pytest
import torch
import transformers

from configs.geometry import VideoGeometry
from configs.job import JobFailedError
from configs.model_preset import ModelPreset
from pipelines import LoadedPipeline, load_pipeline
from tests.pipelines.broken import DAMAGED_CONTENT, DAMAGED_FILES, Damage
from tests.tiny_wan import tiny_preset


def _failure(preset: ModelPreset, *, device: str = "cpu", dtype: str = "float32") -> str:
    with pytest.raises(JobFailedError) as caught:
        load_pipeline(preset, device=device, dtype=dtype)
    assert caught.value.code == "model_load_failed"
    assert not caught.value.retryable
    return caught.value.message


def _dtypes(module: torch.nn.Module) -> set[torch.dtype]:
    return {parameter.dtype for parameter in module.parameters()}


def test_a_loaded_pipeline_says_what_it_is(preset: ModelPreset, loaded: LoadedPipeline) -> None:
    assert loaded.preset is preset
    assert loaded.family.name == "wan"
    assert loaded.device == torch.device("cpu")
    assert (loaded.dtype, loaded.vae_dtype) == (torch.float32, torch.float32)
    assert loaded.load_seconds > 0
    assert type(loaded.pipe) is diffusers.WanPipeline
    assert not loaded.pipe.transformer.training


def test_bfloat16_reaches_all_networks(preset: ModelPreset) -> None:
    loaded = load_pipeline(preset, device="cpu", dtype="bfloat16")
    assert _dtypes(loaded.pipe.text_encoder) == {torch.bfloat16}
    assert _dtypes(loaded.pipe.vae) == {torch.bfloat16}
    # Diffusers keeps norms and time embeddings in float32.
    assert loaded.pipe.transformer.blocks[0].attn1.to_q.weight.dtype == torch.bfloat16
    assert loaded.dtype == loaded.pipe.transformer.dtype


def test_weights_are_those_of_the_folder(preset: ModelPreset, loaded: LoadedPipeline) -> None:
    stock = diffusers.WanPipeline.from_pretrained(preset.source, dtype=torch.float32)
    for name in ("text_encoder", "vae", "transformer"):
        expected = getattr(stock, name).state_dict()
        found = getattr(loaded.pipe, name).state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("damage", [*DAMAGED_FILES, *DAMAGED_CONTENT], ids=lambda damage: damage.name)
def test_a_broken_model_is_one_readable_error(tiny_folder: Path, tmp_path: Path, damage: Damage) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "copy")
    damage.apply(folder)
    message = _failure(tiny_preset(folder))
    assert message.startswith(f"model tiny-wan ({folder}) cannot be loaded: ")
    if damage.name != "no index":  # without an index the folder is no Diffusers folder at all
        assert [part for part in damage.said if part not in message] == []


@pytest.mark.parametrize("source", ["no/such/folder", "nothing"])
def test_a_source_that_is_no_folder_and_no_hub_id(preset: ModelPreset, source: str) -> None:
    message = _failure(preset.model_copy(update={"source": source}))
    assert message == (
        f"model tiny-wan ({source}) cannot be loaded: there is no Diffusers folder (with a model_index.json)"
    )


def test_a_tokenizer_without_its_file(tiny_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "copy")
    (folder / "tokenizer/tokenizer.json").unlink()
    assert str(folder / "tokenizer") in _failure(tiny_preset(folder))


@pytest.mark.parametrize(
    "geometry",
    [
        VideoGeometry(vae_spatial=16, vae_temporal=4, patch=(1, 2, 2)),
        VideoGeometry(vae_spatial=8, vae_temporal=8, patch=(1, 2, 2)),
        VideoGeometry(vae_spatial=8, vae_temporal=4, patch=(1, 1, 1)),
    ],
)
def test_geometry_other_than_the_presets(preset: ModelPreset, geometry: VideoGeometry) -> None:
    message = _failure(preset.model_copy(update={"geometry": geometry}))
    assert f"the pipeline has {preset.geometry!r}, the preset says {geometry!r}" in message


def test_unknown_device_and_dtype(preset: ModelPreset) -> None:
    assert "device 'tpu' is not one of" in _failure(preset, device="tpu")
    assert "dtype 'int4' is not one of" in _failure(preset, dtype="int4")


def _hub_cache(tiny_folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lay the folder out as the hub's cache does, for owner/tiny at branch main and revision abc, offline."""
    repository = cache / "models--owner--tiny"
    commit = "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(tiny_folder, repository / "snapshots" / commit)
    for name in ("main", "abc"):
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / name).write_text(commit, encoding="utf-8")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("revision", [None, "abc"])
def test_a_hub_id_loads_from_the_cache(
    preset: ModelPreset,
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    revision: str | None,
) -> None:
    _hub_cache(tiny_folder, tmp_path, monkeypatch)
    named = preset.model_copy(update={"source": "owner/tiny", "revision": revision})
    assert load_pipeline(named, device="cpu", dtype="float32").pipe.transformer is not None


def test_a_hub_id_or_revision_that_cannot_be_had(
    preset: ModelPreset, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _hub_cache(tiny_folder, tmp_path, monkeypatch)
    absent = preset.model_copy(update={"source": "owner/absent"})
    assert "the hub gives no owner/absent: " in _failure(absent)
    old = preset.model_copy(update={"source": "owner/tiny", "revision": "xyz"})
    assert "the hub gives no owner/tiny at revision xyz: " in _failure(old)


def test_loads_at_once_do_not_disturb_each_other(preset: ModelPreset, loaded: LoadedPipeline) -> None:
    done: list[LoadedPipeline] = []

    def load() -> None:
        done.append(load_pipeline(preset, device="cpu", dtype="float32"))

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 4
    expected = loaded.pipe.transformer.state_dict()
    for each in done:
        found = each.pipe.transformer.state_dict()
        assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_progress_bars_are_as_they_were(preset: ModelPreset) -> None:
    logs = (diffusers.utils.logging, transformers.utils.logging)
    assert all(log.is_progress_bar_enabled() for log in logs)
    load_pipeline(preset, device="cpu", dtype="float32")
    assert all(log.is_progress_bar_enabled() for log in logs)


def test_loading_draws_nothing(preset: ModelPreset, capfd: pytest.CaptureFixture[str]) -> None:
    load_pipeline(preset, device="cpu", dtype="float32")
    assert capfd.readouterr() == ("", "")
