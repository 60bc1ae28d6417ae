"""The backend ``block_topk`` in a real (tiny) Wan transformer: what is counted, and what is left behind.

That it computes what the definition says, in every family, is in families/test_families.py.
"""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import attention
from tests.attention import tiny_transformer
from tests.attention.tiny_transformer import LAYERS, TOKENS, run


@pytest.fixture(scope="module")
def transformer() -> Any:
    return tiny_transformer.tiny_transformer()


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def test_pairs_are_counted_as_they_are_kept(transformer: Any) -> None:
    """Three frames are three boxes; each keeps itself and its neighbours, 7 of 9 pairs. In one layer."""
    outs, dense = [], run(transformer)
    for impl in ("torch", "triton"):
        settings: dict[str, Any] = {"tile_thw": (1, 5, 7), "top_k": 1, "impl": impl, "dense_layers": [0, 1]}
        with attention.swap(transformer, "block_topk", **settings) as handle:
            outs.append(run(transformer))
        report = handle.report()
        assert (report.implementation, report.sparse_calls, report.dense_calls) == (impl, 1, LAYERS - 1)
        assert (report.density, report.top_k, report.pooled_rest) == (7 / 9, 1, False)
        assert (report.tile_thw, report.block_size, report.anchor_stride) == ((1, 5, 7), None, None)
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-5, atol=1e-5)
    assert (outs[0] - dense).abs().max() > 1e-4


def test_keeping_all_boxes_is_the_dense_model(transformer: Any) -> None:
    dense = run(transformer)
    with attention.swap(transformer, "block_topk", block_size=20, top_k=0.99, pooled_rest=True) as handle:
        torch.testing.assert_close(run(transformer), dense, rtol=1e-5, atol=1e-5)
    assert handle.report().density == 1.0
    assert torch.equal(run(transformer), dense)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in transformer.modules())


def test_a_timestep_for_each_token_follows_its_token(transformer: Any) -> None:
    timestep = torch.randint(0, 1000, (2, TOKENS), generator=torch.Generator().manual_seed(1)).float()
    with attention.swap(transformer, "block_topk", tile_thw=(2, 2, 3), anchor_stride=5, top_k=99):
        out = run(transformer, timestep)
    torch.testing.assert_close(out, run(transformer, timestep), rtol=1e-5, atol=1e-5)


def test_compiled_blocks_have_no_graph_break(transformer: Any) -> None:
    settings: dict[str, Any] = {"tile_thw": (2, 2, 3), "anchor_stride": 7, "top_k": 0.4, "pooled_rest": True}
    with attention.swap(transformer, "block_topk", **settings) as handle:
        expected = run(transformer)
    model = copy.deepcopy(transformer)
    for block in model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    with attention.swap(model, "block_topk", **settings) as compiled:
        torch.testing.assert_close(run(model), expected, rtol=1e-5, atol=1e-5)
    assert compiled.report() == handle.report()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_size": 4}, "backend block_topk needs top_k"),
        ({"top_k": 3}, "boxes need tile_thw or block_size, one of them"),
        ({"top_k": 1.5, "block_size": 4}, "top_k must be a share of the boxes"),
        ({"top_k": 3, "block_size": 4, "window": 1}, "backend block_topk takes no window"),
        ({"top_k": 3, "block_size": 4, "anchor_offset": 1}, "anchor_offset=1 without an anchor_stride"),
        ({"backend": "window", "window": 1, "top_k": 3}, "backend window takes no top_k"),
        ({"top_k": 3, "block_size": 4, "impl": "reference"}, "impl='reference' cannot be swapped in"),
    ],
)
def test_settings_out_of_range_are_named(transformer: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention.swap(transformer, **{"backend": "block_topk"} | arguments)
