"""A tiny random Wan pipeline for the tests of this folder, loaded once."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from configs.job import JobParameters
from configs.model_preset import ModelPreset
from configs.resolve import GenerationRequest, resolve
from pipelines import LoadedPipeline, load_pipeline
from tests.tiny_wan import tiny_preset, write_tiny_wan


@pytest.fixture(autouse=True)
def _one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tiny tensors on a shared machine: more threads would only wait for each other."""
    if request.path.parent != Path(__file__).parent:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Diffusers folder; tests that break it copy it first."""
    return write_tiny_wan(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def preset(tiny_folder: Path) -> ModelPreset:
    """The preset that fits the folder."""
    return tiny_preset(tiny_folder)


@pytest.fixture(scope="session")
def loaded(preset: ModelPreset) -> LoadedPipeline:
    """One pipeline for all tests: none may leave a trace in it."""
    return load_pipeline(preset, device="cpu", dtype="float32")


@pytest.fixture
def own_pipeline(preset: ModelPreset) -> LoadedPipeline:
    """A pipeline that the test may damage."""
    return load_pipeline(preset, device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def params(preset: ModelPreset) -> JobParameters:
    """A job with the preset's defaults: 9 frames of 64x64, 3 steps, sparse, no guidance."""
    request = GenerationRequest(prompt="a red circle moving left", seed=5)
    return resolve(request, preset, preset.attention)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert [each.name for each in threading.enumerate() if each.name.startswith("reelwright")] == []
