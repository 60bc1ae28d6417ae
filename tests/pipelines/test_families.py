"""The family table against the libraries and the presets."""

from typing import get_args

import diffusers
import pytest
import transformers

from configs.model_preset import ModelPreset
from pipelines import LoadedPipeline
from pipelines.families import FAMILIES


def test_every_family_that_a_preset_may_name_is_in_the_table() -> None:
    assert set(FAMILIES) == set(get_args(ModelPreset.model_fields["family"].annotation))


@pytest.mark.parametrize("name", FAMILIES)
def test_classes_exist_in_their_library(name: str) -> None:
    family = FAMILIES[name]
    libraries = {"diffusers": diffusers, "transformers": transformers}
    assert family.name == name
    assert hasattr(diffusers, family.pipeline_class)
    for network in family.networks:
        assert hasattr(libraries[network.library], network.class_name)


def test_cancel_modules_are_the_blocks_and_the_decoder(loaded: LoadedPipeline) -> None:
    pipe = loaded.pipe
    assert loaded.family.cancel_modules(pipe) == [
        *pipe.text_encoder.encoder.block,
        *pipe.transformer.blocks,
        pipe.vae.decoder,
    ]
