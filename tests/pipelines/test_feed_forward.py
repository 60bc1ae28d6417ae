"""Feed-forward layers in slices: the same numbers, in every family, under a swap and compiled."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diffusers.models.attention import FeedForward
from torch import Tensor

from attention import swap
from pipelines.feed_forward import OneFp8Operator, OneOperator, SlicedFeedForward, sliced_feed_forward
from pipelines.fp8 import to_fp8
from tests.attention.families.running import built, run
from tests.attention.families.variants import VARIANTS, Variant
from tests.pipelines.live_bytes import LiveBytes

pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")  # of Mochi in float64


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def layers(model: Any) -> list[FeedForward]:
    """All of a transformer's feed-forward layers."""
    return [module for module in model.modules() if isinstance(module, FeedForward)]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_slices_are_the_whole_in_every_family_under_a_swap(variant: Variant) -> None:
    model = built(variant)
    shapes: list[tuple[int, ...]] = []
    with swap(model, "anchor_local", block_size=8, anchor_stride=5):
        expected = run(model, variant)
        handles = [
            layer.net[0].register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape)))
            for layer in layers(model)
        ]
        with sliced_feed_forward([model], 4):
            found = run(model, variant)
        for handle in handles:
            handle.remove()
        after = run(model, variant)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)  # float64
    assert torch.equal(after, expected)
    assert len(shapes) >= 3 * len(layers(model)) > 0  # a text may have less tokens than four slices take
    assert [type(layer) for layer in layers(model)] == [FeedForward] * len(layers(model))


@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 8, 100])
@pytest.mark.parametrize("chunks", [1, 2, 3, 8])
def test_any_number_of_tokens_goes_into_any_number_of_slices(tokens: int, chunks: int) -> None:
    layer = FeedForward(4, inner_dim=16).double().eval()
    x = torch.randn(2, tokens, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = layer(x)
    with sliced_feed_forward([layer], chunks):
        torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
@pytest.mark.parametrize("chunks", [1, 4])
def test_layers_as_one_operator_are_the_whole_in_every_family(variant: Variant, chunks: int) -> None:
    model = built(variant)
    expected = run(model, variant)
    with sliced_feed_forward([model], chunks):
        torch.testing.assert_close(run(model, variant), expected, rtol=0, atol=1e-12)
    assert torch.equal(run(model, variant), expected)


def test_only_plain_layers_with_gelu_by_tanh_become_one_operator() -> None:
    plain = FeedForward(16, inner_dim=32, activation_fn="gelu-approximate").eval()
    others = [
        FeedForward(16, inner_dim=32, activation_fn=name).eval()
        for name in ("gelu", "geglu", "swiglu", "linear-silu")
    ]
    watched, no_bias = (
        FeedForward(16, inner_dim=32, activation_fn="gelu-approximate", bias=bias).eval()
        for bias in (True, False)
    )
    watched.net[2].register_forward_hook(lambda *args: None)
    others += [watched, no_bias]
    with sliced_feed_forward([plain, *others], 1):
        assert type(plain) is OneOperator
        assert {type(layer) for layer in others} == {FeedForward}
    with sliced_feed_forward([plain, *others], 2):
        assert {type(layer) for layer in others} == {SlicedFeedForward}
    assert {type(layer) for layer in (plain, *others)} == {FeedForward}
    to_fp8([plain.bfloat16()])
    with sliced_feed_forward([plain], 1):
        assert type(plain) is OneFp8Operator


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_layer_in_fp8_is_the_same_in_slices(chunks: int) -> None:
    layer = FeedForward(32, inner_dim=64, activation_fn="gelu-approximate").bfloat16().eval()
    x = torch.randn(2, 20, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    to_fp8([layer])
    expected = layer(x)
    with sliced_feed_forward([layer], chunks):
        torch.testing.assert_close(layer(x), expected, rtol=2.0**-7, atol=2.0**-7)


def test_slices_need_a_part_of_the_memory() -> None:
    layer = FeedForward(8, inner_dim=512, activation_fn="gelu-approximate").eval()
    x = torch.ones(1, 1024, 8)
    peaks = []
    for chunks in (1, 8):
        count = LiveBytes()
        with sliced_feed_forward([layer], chunks), count:
            layer(x)
        peaks.append(count.peak)
    assert peaks[1] < peaks[0] / 6


@pytest.mark.parametrize(
    ("activation", "calls"), [("geglu", 0), ("gelu-approximate", 1)], ids=["slices", "operator"]
)
def test_a_compiled_layer_compiles_once_for_all_lengths_and_jobs(activation: str, calls: int) -> None:
    layer = FeedForward(4, inner_dim=16, activation_fn=activation).eval()
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(len(inputs))
        assert sum("feed_forward" in str(node.target) for node in graph.graph.nodes) == calls
        return graph.forward

    compiled = torch.compile(lambda x: layer(x), backend=backend, fullgraph=True, dynamic=True)
    for tokens in (40, 64, 104):
        x = torch.randn(1, tokens, 4, generator=torch.Generator().manual_seed(0))
        expected = layer(x)
        with sliced_feed_forward([layer], 4):
            torch.testing.assert_close(compiled(x), expected)
    torch._dynamo.reset()
    assert len(graphs) == 1


def test_no_slice_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="feed_forward_chunks is 0"), sliced_feed_forward([], 0):
        pass
