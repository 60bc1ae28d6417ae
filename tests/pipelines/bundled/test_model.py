"""The committed model: its folder, the preset that serves it, and one clip that shows what was said."""

from pathlib import Path

import pytest
import torch

from configs.job import JobFinished, JobPaths
from configs.model_preset import BUNDLED_MODEL, ModelPreset, find_model
from configs.resolve import GenerationRequest, resolve
from pipelines import LoadedPipeline, load_pipeline, run_job
from pipelines.bundled.prompts import spec_from_prompt, vocabulary
from pipelines.bundled.read_back import ATTRIBUTES, read_attributes
from pipelines.bundled.training.components import (
    FLOW_SHIFT,
    SPATIAL_FACTOR,
    TEMPORAL_FACTOR,
    TEXT_TOKENS,
    make_text_encoder,
    make_transformer,
    make_vae,
)
from tests.pipelines.clips import decoded_frames

MAX_FOLDER_BYTES = 30_000_000
PROMPT = "a red circle moving left quickly on a white background"


@pytest.fixture(scope="module")
def bundled() -> ModelPreset:
    """The preset."""
    return find_model(BUNDLED_MODEL)


@pytest.fixture(scope="module")
def loaded(bundled: ModelPreset) -> LoadedPipeline:
    """The model on a CPU, in whatever suits it."""
    return load_pipeline(bundled, device="cpu")


def test_folder_is_small(bundled: ModelPreset) -> None:
    assert bundled.folder is not None
    assert sum(path.stat().st_size for path in bundled.folder.rglob("*") if path.is_file()) < MAX_FOLDER_BYTES


def test_preset_is_of_the_trained_model(bundled: ModelPreset, loaded: LoadedPipeline) -> None:
    geometry, pipe = bundled.geometry, loaded.pipe
    assert (geometry.vae_spatial, geometry.vae_temporal) == (SPATIAL_FACTOR, TEMPORAL_FACTOR)
    assert geometry.patch == tuple(pipe.transformer.config.patch_size)
    assert bundled.max_sequence_length == TEXT_TOKENS == pipe.tokenizer.model_max_length
    assert pipe.scheduler.config.flow_shift == FLOW_SHIFT
    assert set(vocabulary()) <= set(pipe.tokenizer.get_vocab())
    for name, made in (
        ("text_encoder", make_text_encoder),
        ("vae", make_vae),
        ("transformer", make_transformer),
    ):
        with torch.device("meta"):
            expected = {key: value.shape for key, value in made().state_dict().items()}
        assert {key: value.shape for key, value in getattr(pipe, name).state_dict().items()} == expected


def test_a_clip_shows_what_the_prompt_says(
    bundled: ModelPreset, loaded: LoadedPipeline, tmp_path: Path
) -> None:
    """With the defaults: sparse attention, and the file that a user downloads."""
    asked = spec_from_prompt(PROMPT)
    params = resolve(GenerationRequest(prompt=PROMPT, seed=7), bundled, bundled.attention)
    *_, last = run_job(loaded, params, JobPaths(tmp_path / "clip.mp4"), is_cancelled=lambda: False)
    assert isinstance(last, JobFinished)
    shown = read_attributes(decoded_frames(tmp_path / "clip.mp4", params.height, params.width))
    assert [getattr(shown, name) for name in ATTRIBUTES] == [getattr(asked, name) for name in ATTRIBUTES]
    attention = last.result.attention
    assert attention.backend == "anchor_local"
    assert attention.sparse_calls > 0
    assert 0 < attention.density < 0.5
