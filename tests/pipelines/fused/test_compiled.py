"""Fused blocks compiled: one graph for all layers and lengths, and no copies for operators in place."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from attention import swap
from pipelines.compiling import RepeatedBlocks
from pipelines.feed_forward import sliced_feed_forward
from pipelines.fp8 import to_fp8
from pipelines.fused.wan import fuse_blocks
from pipelines.joined_attention import join_projections
from tests.attention.families.running import built
from tests.attention.families.variants import GRID, Variant
from tests.pipelines.fused.test_wan import PLAIN, WAN, one_pass, with_heads

# Inductor itself uses what PyTorch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _own_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("variant", WAN, ids=lambda variant: variant.name)
@pytest.mark.parametrize("joined", [False, True])
def test_one_graph_serves_all_layers_and_lengths(variant: Variant, joined: bool) -> None:
    model = built(variant).float()
    with swap(model, "anchor_local", block_size=8, anchor_stride=5):
        expected = [one_pass(model, variant, grid) for grid in (GRID, (2, 3, 4))]
    if joined:
        join_projections(model)
    fuse_blocks(model)
    RepeatedBlocks(list(model.blocks), torch.device("cpu"), "on")
    with swap(model, "anchor_local", block_size=8, anchor_stride=5), sliced_feed_forward([model], 2):
        found = [one_pass(model, variant, grid) for grid in (GRID, (2, 3, 4))]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert_one_graph_without_copies()


@pytest.mark.parametrize("variant", WAN, ids=lambda variant: variant.name)
@pytest.mark.parametrize("joined", [False, True])
def test_one_graph_serves_all_layers_and_lengths_in_fp8(variant: Variant, joined: bool) -> None:
    model = built(variant).bfloat16()
    if joined:
        join_projections(model)
    to_fp8(model.blocks)
    fuse_blocks(model)
    with swap(model, "anchor_local", block_size=8, anchor_stride=5), sliced_feed_forward([model], 2):
        expected = [one_pass(model, variant, grid) for grid in (GRID, (2, 3, 4))]
        RepeatedBlocks(list(model.blocks), torch.device("cpu"), "on")
        found = [one_pass(model, variant, grid) for grid in (GRID, (2, 3, 4))]
    for one, other in zip(found, expected, strict=True):
        # A rounding of what is compiled to bfloat16 may be a step of e4m3 later.
        assert (one - other).float().norm() < 0.02 * other.float().norm()
    assert_one_graph_without_copies()


def test_an_odd_number_of_heads() -> None:
    """Then v of the second half is a part of where v of the first was."""
    model = with_heads(3)
    with swap(model, "dense"):
        expected = one_pass(model, PLAIN, GRID)
    join_projections(model)
    fuse_blocks(model)
    RepeatedBlocks(list(model.blocks), torch.device("cpu"), "on")
    with swap(model, "dense") as handle, sliced_feed_forward([model], 2):
        found = one_pass(model, PLAIN, GRID)
    assert handle.report().dense_calls == len(model.blocks)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert_one_graph_without_copies()


def assert_one_graph_without_copies() -> None:
    assert counters["stats"]["unique_graphs"] == 1
    missed = {name: count for name, count in counters["inductor"].items() if "missed_reinplacing" in name}
    assert not any(missed.values()), missed
