"""What a clip costs, against what its job reports after running."""

import pytest

from attention.pattern import density
from attention.tiles import tile_density
from configs.attention import AttentionConfig
from configs.job import JobParameters
from configs.model_preset import ModelPreset
from server.clip_cost import attended_share, clip_cost, transformer_passes
from tests.server.samples import parameters, result

SPARSE = AttentionConfig(block_size=32, anchor_stride=17, dense_steps=0, min_tokens=0)
TOKENS = 3 * 4 * 4  # 9 frames of 64x64


def with_attention(attention: AttentionConfig, **changes: object) -> JobParameters:
    """The small clip with another attention."""
    return parameters().model_copy(update={"attention": attention} | changes)


def preset_of_layers(num_layers: int | None) -> ModelPreset:
    """A model of Wan's geometry."""
    return ModelPreset(name="tiny-wan", source="nowhere", num_layers=num_layers)


def test_tokens_and_passes() -> None:
    cost = clip_cost(with_attention(SPARSE), preset_of_layers(2))
    assert (cost.tokens, cost.passes) == (TOKENS, 1)
    guided = with_attention(SPARSE, guidance_scale=1.5, num_frames=17)
    assert clip_cost(guided, preset_of_layers(2)).tokens == 5 * 4 * 4
    assert transformer_passes(guided) == 2


@pytest.mark.parametrize(
    ("change", "num_layers", "sparse_share"),
    [
        ({}, 2, 1.0),
        ({"dense_steps": 0.5}, 2, 0.5),
        ({"dense_steps": 1}, 2, 0.75),
        ({"dense_layers": (0,)}, 2, 0.5),
        ({"dense_layers": (0, 1)}, 8, 0.75),
        ({"dense_steps": 2, "dense_layers": (0,)}, 2, 0.25),
        ({"dense_layers": (0,)}, None, 1.0),
    ],
)
def test_dense_steps_and_layers_attend_to_everything(
    change: dict[str, object], num_layers: int | None, sparse_share: float
) -> None:
    attention = SPARSE.model_copy(update=change)
    cost = clip_cost(with_attention(attention), preset_of_layers(num_layers))
    sparse = density(TOKENS, 32, 17)
    assert 0.0 < sparse < 1.0
    assert cost.sparse_density == sparse
    assert cost.density == pytest.approx(sparse_share * sparse + 1.0 - sparse_share)


@pytest.mark.parametrize(
    ("window", "pairs"),
    [
        ({"window": 0}, (3 + 2) * 16**2),  # each frame itself, the later two also the first
        ({"window": 0, "global_frames": 0}, 3 * 16**2),
        ({"window": 1, "window_unit": "tokens", "global_frames": 0}, 3 * TOKENS - 2),
    ],
)
def test_a_window_attends_to_its_frames_and_the_first(window: dict[str, object], pairs: int) -> None:
    attention = AttentionConfig.model_validate(
        {"backend": "window", "dense_steps": 0, "min_tokens": 0} | window
    )
    assert clip_cost(with_attention(attention), preset_of_layers(2)).sparse_density == pairs / TOKENS**2


def test_tiles_attend_to_their_box_and_the_anchors() -> None:
    tiles = AttentionConfig(
        token_order="tile", tile_thw=(2, 2, 3), anchor_stride=5, dense_steps=0, min_tokens=0
    )
    cost = clip_cost(with_attention(tiles), preset_of_layers(2))
    assert cost.sparse_density == tile_density((3, 4, 4), (2, 2, 3), 5)
    with pytest.raises(ValueError, match="resolved"):
        clip_cost(with_attention(tiles.model_copy(update={"tile_thw": "auto"})), preset_of_layers(2))


def test_boxes_attend_to_as_many_as_they_keep() -> None:
    boxes = AttentionConfig(
        backend="block_topk", tile_thw=(1, 2, 2), anchor_stride="none", top_k=0.5, dense_steps=0, min_tokens=0
    )
    cost = clip_cost(with_attention(boxes), preset_of_layers(2))
    assert cost.sparse_density == 6 / 12  # 12 boxes of 4 tokens, of which 6 are kept
    with pytest.raises(ValueError, match="resolved"):
        clip_cost(with_attention(boxes.model_copy(update={"tile_thw": "auto"})), preset_of_layers(2))


@pytest.mark.parametrize(
    "attention",
    [SPARSE.model_copy(update={"backend": "dense"}), SPARSE.model_copy(update={"min_tokens": 49})],
)
def test_a_dense_clip_attends_to_everything(attention: AttentionConfig) -> None:
    cost = clip_cost(with_attention(attention), preset_of_layers(2))
    assert (cost.density, cost.sparse_density) == (1.0, 1.0)


def test_unresolved_attention_is_an_error() -> None:
    with pytest.raises(ValueError, match="resolved"):
        clip_cost(with_attention(AttentionConfig(min_tokens=0)), preset_of_layers(2))


def test_what_a_job_reports_counts_its_dense_calls() -> None:
    report = result().attention  # density 0.5 in 6 calls, 2 dense ones
    assert attended_share(report) == (6 * 0.5 + 2) / 8
    assert attended_share(report.model_copy(update={"sparse_calls": 0, "dense_calls": 0})) == 1.0
