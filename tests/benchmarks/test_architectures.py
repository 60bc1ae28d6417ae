"""The architectures are the published ones: sizes counted on Diffusers' and transformers' own classes."""

import pytest
import torch

from benchmarks.architectures import ARCHITECTURES, WAN_2_1_1_3B, Architecture
from benchmarks.random_models import empty_module, fingerprint, random_module, word_tokenizer

PARTS = [(name, part) for name, each in ARCHITECTURES.items() for part in each.components]
# Token grids that papers and model cards name for the published clips.
GRIDS = {
    "article-7b": (24, 32, 32),
    "cogvideox-5b": (13, 30, 45),
    "hunyuanvideo": (33, 45, 80),
    "wan2.1-t2v-1.3b": (21, 30, 52),
    "wan2.1-t2v-14b": (21, 45, 80),
    "wan2.2-ti2v-5b": (31, 22, 40),
}


@pytest.mark.parametrize(("name", "part"), PARTS)
def test_every_part_has_as_many_parameters_as_stated(name: str, part: str) -> None:
    component = ARCHITECTURES[name].components[part]
    module = empty_module(component, "meta", torch.bfloat16)
    assert sum(parameter.numel() for parameter in module.parameters()) == component.parameters


def test_clips_have_the_tokens_that_they_are_known_for() -> None:
    assert {name: each.grid for name, each in ARCHITECTURES.items()} == GRIDS


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=lambda each: str(each.name))
def test_tiny_ones_are_of_the_same_kind_and_fit_a_cpu(architecture: Architecture) -> None:
    tiny = architecture.shrunk()
    for name, component in tiny.components.items():
        module = empty_module(component, "meta", torch.float32)
        assert type(module).__name__ == architecture.components[name].class_name
        assert sum(parameter.numel() for parameter in module.parameters()) < 1_000_000
    assert 16 < tiny.tokens < 1000


def test_fewer_layers_keep_the_proportion_of_their_kinds() -> None:
    fewer = ARCHITECTURES["hunyuanvideo"].with_layers(6).transformer.config
    assert (fewer["num_layers"], fewer["num_single_layers"]) == (2, 4)
    assert ARCHITECTURES["wan2.1-t2v-14b"].with_layers(8).layers == 8
    with pytest.raises(ValueError, match="--layers 7 does not keep the proportion of 20 num_layers and 40 "):
        ARCHITECTURES["hunyuanvideo"].with_layers(7)
    with pytest.raises(ValueError, match="has 1 to 40"):
        ARCHITECTURES["wan2.1-t2v-14b"].with_layers(41)


def test_a_seed_means_the_same_weights_and_the_fingerprint_knows_them() -> None:
    component = WAN_2_1_1_3B.shrunk().transformer
    first, again, other = (random_module(component, "cpu", torch.bfloat16, seed) for seed in (0, 0, 1))
    assert fingerprint(first) == fingerprint(again) != fingerprint(other)
    with torch.no_grad():
        again.proj_out.bias[3] += 1  # type: ignore[index, operator, union-attr]
    assert fingerprint(first) != fingerprint(again)


def test_weights_are_in_the_types_that_loading_gives_them() -> None:
    module = random_module(WAN_2_1_1_3B.shrunk().transformer, "cpu", torch.bfloat16, 0)
    kept = {"time_embedder", "scale_shift_table", "norm2"}
    for name, parameter in module.named_parameters():
        wanted = torch.float32 if kept & set(name.split(".")) else torch.bfloat16
        assert parameter.dtype == wanted, name
        assert not parameter.requires_grad
    assert {buffer.dtype for buffer in module.buffers()} == {torch.float32}


def test_words_become_tokens_all_over_the_vocabulary() -> None:
    tokens = word_tokenizer(256_384)("w0 w1 w999 never", padding="max_length", max_length=8).input_ids
    assert tokens == [3, 259, 255_747, 2, 1, 0, 0, 0]
