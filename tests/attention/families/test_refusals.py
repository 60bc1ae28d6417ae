"""What a family cannot run is said by name, and what comes in odd shapes is run or refused, never guessed."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diffusers import CogVideoXTransformer3DModel

import attention
from tests.attention.families import running
from tests.attention.families.running import arguments, run
from tests.attention.families.variants import BY_NAME, GRID, tokens

pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("lengths", [(6, 6), (0, 3), (1, 6), (0, 0)])
def test_text_of_any_length_equals_the_dense_model(lengths: tuple[int, int]) -> None:
    """Per batch entry: the mask of one is never that of another; Mochi has no text for an empty prompt."""
    for name in ("hunyuan", "mochi"):
        variant = BY_NAME[name]
        if name == "hunyuan" and 0 in lengths:
            continue  # its text encoder divides by the length
        model, given = running.built(variant), arguments(variant)
        mask = torch.stack([torch.arange(6) < length for length in lengths])
        given |= {"encoder_attention_mask": mask}
        dense = model(**given, return_dict=False)[0]
        with attention.swap(model, block_size=20, anchor_stride=1) as handle:
            torch.testing.assert_close(model(**given, return_dict=False)[0], dense, rtol=1e-6, atol=1e-6)
        assert handle.report().text_tokens == max(lengths)
        # Each entry alone is what it is in the batch.
        with attention.swap(model, token_order="tile", tile_thw=(2, 2, 2), anchor_stride=5):
            both = model(**given, return_dict=False)[0]
            for entry in range(2):
                alone = {
                    key: value[entry : entry + 1] if isinstance(value, torch.Tensor) else value
                    for key, value in given.items()
                }
                torch.testing.assert_close(
                    model(**alone, return_dict=False)[0], both[entry : entry + 1], rtol=1e-6, atol=1e-6
                )


def test_padded_text_has_no_influence() -> None:
    for name in ("hunyuan", "hunyuan15_i2v", "mochi"):
        variant = BY_NAME[name]
        model, given = running.built(variant), arguments(variant)
        with attention.swap(model, block_size=20, anchor_stride=7):
            expected = model(**given, return_dict=False)[0]
            text = given["encoder_hidden_states"].clone()
            text[~given["encoder_attention_mask"].bool()] = 77.0
            out = model(**given | {"encoder_hidden_states": text}, return_dict=False)[0]
            text[given["encoder_attention_mask"].bool()] *= 2
            other = model(**given | {"encoder_hidden_states": text}, return_dict=False)[0]
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
        assert (other - expected).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("ltx_t2v", {"num_frames": None}, "called without num_frames, height and width, or video_coords"),
        ("ltx_t2v", {"height": 6}, "hidden_states has 105 tokens, and their grid 3 x 6 x 7"),
        (
            "ltx_condition",
            {"hidden_states": torch.zeros(2, 112, 4).double(), "video_coords": torch.zeros(2, 3, 112)},
            "hidden_states has 112 tokens, and their grid 1 x 1 x 1; condition tokens",
        ),
        (
            "mochi",
            {"encoder_attention_mask": torch.tensor([[1, 0, 1, 0, 0, 0]] * 2)},
            "encoder_attention_mask must be ones and then zeros",
        ),
        ("cogvideox_2b", {"attention_kwargs": {"attention_mask": torch.ones(2, 111)}}, "no attention_mask"),
    ],
)
def test_passes_that_cannot_be_run_are_refused(name: str, change: dict[str, Any], message: str) -> None:
    variant = BY_NAME[name]
    model = running.built(variant)
    before = run(model, variant)
    with attention.swap(model, block_size=20, anchor_stride=7):
        with pytest.raises(ValueError, match=message):
            model(**arguments(variant) | change)
        run(model, variant)  # a refused pass leaves nothing behind
    assert torch.equal(run(model, variant), before)


def test_causal_blocks_of_frames_are_refused() -> None:
    variant = BY_NAME["skyreels_v2"]
    model = running.built(variant)
    model._set_ar_attention(3)
    with (
        attention.swap(model, block_size=20, anchor_stride=7),
        pytest.raises(ValueError, match=r"SkyReelsV2Transformer3DModel: causal blocks of frames"),
    ):
        run(model, variant)


def test_unknown_processors_are_refused_by_name() -> None:
    model = running.built(BY_NAME["cogvideox_2b"])
    model.fuse_qkv_projections()
    expected = "attn1 has processor FusedCogVideoXAttnProcessor2_0; expected CogVideoXAttnProcessor2_0"
    with pytest.raises(ValueError, match=expected):
        attention.swap(model, block_size=20, anchor_stride=7)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_sinks_are_refused_beside_text() -> None:
    model = running.built(BY_NAME["hunyuan"])
    with pytest.raises(ValueError, match="sinks are not supported where text and video share"):
        attention.swap(model, "window", window=1, sinks=torch.zeros(2), sink_mode="null_logit")
    with pytest.raises(ValueError, match="impl='reference' cannot be swapped in"):
        attention.swap(model, "window", window=1, impl="reference")


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            {"token_order": "spiral", "anchor_stride": 2},
            "token_order must be one of raster, tile, got 'spiral'",
        ),
        ({"token_order": "tile", "anchor_stride": 2}, "anchor_local needs tile_thw and anchor_stride"),
        (
            {"token_order": "tile", "tile_thw": (1, 1, 1), "anchor_stride": 2, "block_size": 3},
            "token_order tile takes no block_size",
        ),
        (
            {"block_size": 3, "tile_thw": (1, 1, 1), "anchor_stride": 2},
            "token_order raster takes no tile_thw",
        ),
        (
            {"block_size": 3, "block_unit": "rows", "anchor_stride": 2},
            "block_unit must be one of tokens, frames",
        ),
    ],
)
def test_orders_that_do_not_fit_are_named(said: dict[str, Any], message: str) -> None:
    model = running.built(BY_NAME["wan21_t2v"])
    with pytest.raises(ValueError, match=message):
        attention.swap(model, **said)


def test_blocks_in_frames_are_blocks_of_their_tokens() -> None:
    variant = BY_NAME["ltx_t2v"]
    model = running.built(variant)
    with attention.swap(model, block_size=2, block_unit="frames", anchor_stride=11) as handle:
        out = run(model, variant)
    report = handle.report()
    assert (report.block_size, report.block_unit) == (2, "frames")
    with attention.swap(model, block_size=2 * GRID[1] * GRID[2], anchor_stride=11) as handle:
        assert torch.equal(run(model, variant), out)
    assert report.density == handle.report().density == attention.density(tokens(GRID), 70, 11)


def test_arguments_may_be_positional() -> None:
    variant = BY_NAME["wan22_ti2v"]
    model, given = running.built(variant), arguments(variant)
    with attention.swap(model, block_size=20, anchor_stride=7):
        named = model(**given, return_dict=False)[0]
        names = ("hidden_states", "timestep", "encoder_hidden_states")
        assert torch.equal(model(*(given[name] for name in names), return_dict=False)[0], named)


def test_a_model_in_training_dtype_keeps_it() -> None:
    variant = BY_NAME["cogvideox_5b"]
    model: CogVideoXTransformer3DModel = running.built(variant).to(torch.bfloat16)
    with attention.swap(model, block_size=20, anchor_stride=7):
        out = model(**arguments(variant, dtype=torch.bfloat16), return_dict=False)[0]
    assert out.dtype == torch.bfloat16
    assert bool(out.isfinite().all())
