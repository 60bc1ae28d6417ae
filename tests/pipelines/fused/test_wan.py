"""Fused blocks against stock ones: the same numbers, in every variant of Wan, swapped, hooked, cached."""

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttention, WanTransformerBlock
from peft import LoraConfig
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from attention import SwapReport, swap
from pipelines.feed_forward import sliced_feed_forward
from pipelines.fp8 import to_fp8
from pipelines.fused import norms, rotary, wan
from pipelines.fused.wan import FusedAttention, FusedBlock, fuse_blocks, part_blocks
from pipelines.joined_attention import join_projections, part_projections
from pipelines.step_cache import step_cached
from tests.attention.families.running import arguments, built
from tests.attention.families.variants import BATCH, GRID, TEXT, VARIANTS, Grid, Variant
from tests.pipelines.live_bytes import LiveBytes

WAN = [variant for variant in VARIANTS if type(variant.build()).__name__ == "WanTransformer3DModel"]
PLAIN = WAN[0]


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def one_pass(model: Any, variant: Variant, grid: Grid = GRID) -> Tensor:
    given = arguments(variant, grid, model.patch_embedding.weight.dtype)
    out: Tensor = model(**given, return_dict=False)[0]
    return out


@pytest.mark.parametrize("variant", WAN, ids=lambda variant: variant.name)
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("cross_attn_norm", [False, True])
def test_a_pass_is_the_same_fused_and_before_and_after(
    variant: Variant, joined: bool, swapped: bool, cross_attn_norm: bool
) -> None:
    model = built(variant).float()
    if not cross_attn_norm:
        for block in model.blocks:
            block.norm2 = nn.Identity()

    def ran() -> Tensor:
        if not swapped:
            return one_pass(model, variant)
        with swap(model, "anchor_local", block_size=8, anchor_stride=5) as handle:
            out = one_pass(model, variant)
        assert handle.report().sparse_calls == len(model.blocks)
        return out

    stock = ran()
    if joined:
        assert join_projections(model) == len(model.blocks)
    classes = {name: type(module) for name, module in model.named_modules()}
    before = ran()
    assert fuse_blocks(model) == len(model.blocks)
    assert all(
        type(block) is FusedBlock and isinstance(block.attn1, FusedAttention) for block in model.blocks
    )
    assert fuse_blocks(model) == 0
    found = ran()
    torch.testing.assert_close(found, stock, rtol=1e-5, atol=1e-5)
    part_blocks(model)
    assert {name: type(module) for name, module in model.named_modules()} == classes
    assert torch.equal(ran(), before)
    part_projections(model)
    assert {type(block.attn1) for block in model.blocks} == {WanAttention}


@pytest.mark.parametrize("variant", WAN, ids=lambda variant: variant.name)
@pytest.mark.parametrize("joined", [False, True])
def test_bfloat16_is_as_near_to_float64_as_stock(variant: Variant, joined: bool) -> None:
    model = built(variant)
    truth = one_pass(model, variant)
    model.bfloat16()
    stock = one_pass(model, variant)
    if joined:
        join_projections(model)
    fuse_blocks(model)
    error = (one_pass(model, variant).double() - truth).norm() / truth.norm()
    assert error < 1.2 * (stock.double() - truth).norm() / truth.norm()


def test_the_input_of_a_block_is_not_written_to() -> None:
    model = built(PLAIN).float()
    fuse_blocks(model)
    kept: list[tuple[Tensor, Tensor]] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, args: kept.append((args[0], args[0].clone())))
    one_pass(model, PLAIN)
    assert len(kept) == len(model.blocks)
    assert all(torch.equal(given, copied) for given, copied in kept)


@pytest.mark.parametrize("joined", [False, True])
def test_hooks_on_modules_are_called(joined: bool) -> None:
    model = built(PLAIN).float()
    if joined:
        join_projections(model)
    fuse_blocks(model)
    expected = {"attn1", "attn1.to_out.0", "attn2", "attn2.to_q", "attn2.to_out.0", "ffn", "ffn.net.2"}
    expected |= set() if joined else {"attn1.to_q", "attn1.to_k", "attn1.to_v"}
    called: set[str] = set()

    def watch(name: str) -> None:
        model.blocks[1].get_submodule(name).register_forward_hook(lambda *args: called.add(name))

    for name in expected:
        watch(name)
    one_pass(model, PLAIN)
    assert called == expected


def test_watched_products_are_called_in_joined_layers_too() -> None:
    model = built(PLAIN).float()
    join_projections(model)
    fuse_blocks(model)
    expected = one_pass(model, PLAIN)
    called: list[int] = []
    model.blocks[0].attn1.to_qkv.register_forward_hook(lambda *args: called.append(1))
    torch.testing.assert_close(one_pass(model, PLAIN), expected, rtol=1e-5, atol=1e-5)
    assert called == [1]


def test_layers_with_lora_are_called() -> None:
    model = built(PLAIN).float()
    model.add_adapter(LoraConfig(r=2, target_modules=["blocks.1.attn1.to_v"], init_lora_weights=False))
    expected = one_pass(model, PLAIN)
    assert fuse_blocks(model) == len(model.blocks)
    torch.testing.assert_close(one_pass(model, PLAIN), expected, rtol=1e-5, atol=1e-5)


class Norms(TorchDispatchMode):
    """Counts the operators that norm."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("reelwright::")
        if name.startswith("fused_") and "norm" in name:
            self.counts[name] += 1
        return func(*args, **kwargs or {})


def in_fp8(variant: Variant, joined: bool) -> Any:
    model = built(variant).bfloat16()
    if joined:
        join_projections(model)
    to_fp8(model.blocks)
    return model


@pytest.mark.parametrize("variant", WAN, ids=lambda variant: variant.name)
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("cross_attn_norm", [False, True])
def test_layers_in_fp8_take_norms_quantised(variant: Variant, joined: bool, cross_attn_norm: bool) -> None:
    model = in_fp8(variant, joined)
    if not cross_attn_norm:
        for block in model.blocks:
            block.norm2 = nn.Identity()
    stock = one_pass(model, variant).float()
    fuse_blocks(model)
    with sliced_feed_forward([model], 2), Norms() as norms_of_pass:
        found = one_pass(model, variant)
    quantised = {"fused_norm_fp8", "fused_add_norm_fp8_"}
    quantised |= {"fused_add_norm_fp8"} if cross_attn_norm else set()
    counts = norms_of_pass.counts
    assert {name: count for name, count in counts.items() if "rms" not in name and "rotate" not in name} == (
        dict.fromkeys(quantised, len(model.blocks))
    )
    assert (found.float() - stock).norm() < 0.02 * stock.norm()


@pytest.mark.parametrize("joined", [False, True])
def test_watched_layers_in_fp8_are_called_and_give_the_same(joined: bool) -> None:
    model = in_fp8(PLAIN, joined)
    fuse_blocks(model)
    names = {"attn2", "attn2.to_q", "ffn", *(("attn1.to_qkv",) if joined else ("attn1.to_k",))}
    called: Counter[str] = Counter()

    def watch(block: nn.Module, name: str) -> Any:
        return block.get_submodule(name).register_forward_hook(lambda *args: called.update([name]))

    with sliced_feed_forward([model], 2):
        expected = one_pass(model, PLAIN)
        for name in names:
            handles = [watch(block, name) for block in model.blocks]
            called.clear()
            with Norms() as norms_of_pass:
                found = one_pass(model, PLAIN)
            assert called == {name: len(model.blocks)}
            assert sum(n for each, n in norms_of_pass.counts.items() if "fp8" in each) == 2 * len(
                model.blocks
            )
            assert torch.equal(found, expected)
            for handle in handles:
                handle.remove()


def test_layers_of_which_one_is_not_in_fp8_share_the_stored_norm() -> None:
    model = built(PLAIN).bfloat16()
    model.blocks[0].attn1.to_v, kept = nn.Identity(), model.blocks[0].attn1.to_v
    to_fp8(model.blocks)
    model.blocks[0].attn1.to_v = kept
    stock = one_pass(model, PLAIN).float()
    fuse_blocks(model)
    with Norms() as norms_of_pass:
        found = one_pass(model, PLAIN)
    assert norms_of_pass.counts["fused_norm"] == 1
    assert norms_of_pass.counts["fused_norm_fp8"] == len(model.blocks) - 1
    assert (found.float() - stock).norm() < 0.02 * stock.norm()


def test_another_processor_attends_in_its_own_way() -> None:
    model = built(PLAIN).float()
    expected = one_pass(model, PLAIN)
    join_projections(model)
    fuse_blocks(model)

    class Mine(type(model.blocks[0].attn1.processor)):  # type: ignore[misc]
        """Of somebody who changed what attention does."""

    for block in model.blocks:
        block.attn1.processor, block.attn2.processor = Mine(), Mine()
    torch.testing.assert_close(one_pass(model, PLAIN), expected, rtol=1e-5, atol=1e-5)


def test_unusual_blocks_are_left_alone() -> None:
    model = built(PLAIN)
    handle = model.blocks[1].norm2.register_forward_hook(lambda *args: None)
    assert fuse_blocks(model) == 0
    handle.remove()
    model.blocks[0].attn2.norm_k = nn.Identity()
    assert fuse_blocks(model) == 0
    assert {type(block) for block in model.blocks} == {WanTransformerBlock}
    assert fuse_blocks(nn.Linear(2, 2)) == 0


@pytest.mark.parametrize("cache", ["first_block", "taylor_seer"])
def test_step_caches_take_fused_blocks(cache: Any) -> None:
    stock, fused = built(PLAIN).float(), built(PLAIN).float()
    fuse_blocks(fused)

    def ran(model: Any) -> tuple[list[Tensor], int]:
        with step_cached([model], [model.blocks[-1]], cache) as counts, model.cache_context("cond"):
            outs = [one_pass(model, PLAIN) for _ in range(5)]
        return outs, counts.cached

    expected, cached = ran(stock)
    found, fused_cached = ran(fused)
    assert fused_cached == cached > 0
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


HEADS_APART: dict[str, dict[str, Any]] = {
    "anchor_local": {"backend": "anchor_local", "block_size": 8, "anchor_stride": 5},
    "dense": {"backend": "dense"},
    "block_topk": {"backend": "block_topk", "top_k": 2, "tile_thw": (3, 3, 3)},
    "window": {"backend": "window", "window": 1},
}


def with_heads(heads: int) -> Any:
    model = WanTransformer3DModel(
        num_attention_heads=heads,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
    )
    return model.eval()


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("name", HEADS_APART)
def test_v_of_half_of_the_heads_at_a_time(name: str, heads: int) -> None:
    model = with_heads(heads)
    join_projections(model)
    fuse_blocks(model)

    def ran(at_a_time: bool) -> tuple[Tensor, SwapReport, int]:
        with swap(model, **HEADS_APART[name]) as handle, sliced_feed_forward([model], 3):
            for block in model.blocks:
                assert block.attn1.processor.takes_some_heads
                block.attn1.processor.takes_some_heads = at_a_time
            with Norms() as norms_of_pass:
                out = one_pass(model, PLAIN)
            return out, handle.report(), norms_of_pass.counts["fused_norm_v_"]

    expected, report, halves = ran(False)
    assert halves == 0
    found, report_of_halves, halves = ran(True)
    assert halves == (len(model.blocks) if heads > 1 else 0)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert report_of_halves == report
    assert report.sparse_calls + report.dense_calls == len(model.blocks)


def test_a_narrow_model_keeps_its_heads_and_tokens_together(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_heads(2)
    join_projections(model)
    fuse_blocks(model)

    def apart(most_narrow: int) -> tuple[int, int]:
        monkeypatch.setattr(wan, "MOST_NARROW_CHANNELS", most_narrow)
        with swap(model, "dense"), sliced_feed_forward([model], 3), Norms() as norms_of_pass:
            one_pass(model, PLAIN)
        counts = norms_of_pass.counts
        return counts["fused_norm_v_"], counts["fused_add_norm_both_"]

    width = model.blocks[0].attn1.inner_dim
    assert apart(width) == (0, 0)
    assert apart(width - 1) == (len(model.blocks), len(model.blocks))


def test_heads_with_sinks_stay_together() -> None:
    model = with_heads(2)
    window: dict[str, Any] = {"backend": "window", "window": 1, "sink_mode": "null_logit"}
    with swap(model, **window, sinks=torch.tensor([1.0, 3.0])):
        expected = one_pass(model, PLAIN)
    join_projections(model)
    fuse_blocks(model)
    with swap(model, **window, sinks=torch.tensor([1.0, 3.0])), sliced_feed_forward([model], 3):
        torch.testing.assert_close(one_pass(model, PLAIN), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["attn1", "attn1.to_out.0", "attn2", "attn2.to_out.0"])
def test_what_is_watched_is_not_written_over(name: str) -> None:
    model = built(PLAIN).float()
    join_projections(model)
    fuse_blocks(model)
    kept: list[tuple[Tensor, Tensor]] = []
    for block in model.blocks:
        block.get_submodule(name).register_forward_hook(
            lambda module, args, out: kept.append((out, out.clone()))
        )
    with swap(model, "dense"), sliced_feed_forward([model], 2):
        one_pass(model, PLAIN)
    assert len(kept) == len(model.blocks)
    assert all(torch.equal(given, copied) for given, copied in kept)


def test_a_lean_block_holds_three_and_a_half_times_its_hidden_states() -> None:
    """Beside a small feed-forward; nothing is computed, and what operators hold within is not counted."""
    with torch.device("meta"):
        model: Any = WanTransformer3DModel(num_attention_heads=12, ffn_dim=512, num_layers=1).bfloat16()
        hidden, text = (torch.empty(1, tokens, 1536, dtype=torch.bfloat16) for tokens in (32760, TEXT))
        modulation = torch.empty(1, 6, 1536)
        tables = [torch.empty(1, 32760, 1, 64) for _ in range(2)]
    join_projections(model)
    fuse_blocks(model)
    count = LiveBytes()
    with swap(model, "dense"), sliced_feed_forward([model], 4), count:
        model.blocks[0](hidden, text, modulation, tables)
    assert 1 + count.peak / hidden.nbytes == pytest.approx(3.5, rel=0.01)


@pytest.mark.parametrize("joined", [False, True])
def test_feed_forward_in_slices(joined: bool) -> None:
    """Then q lies apart from k and v too, and what self-attention gives lies where q was."""
    model = built(PLAIN).float()
    fused = copy.deepcopy(model)
    if joined:
        join_projections(fused)
    fuse_blocks(fused)
    with sliced_feed_forward([model, fused], 3):
        torch.testing.assert_close(one_pass(fused, PLAIN), one_pass(model, PLAIN), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted without a GPU only")
@pytest.mark.parametrize("variant", WAN[:2], ids=lambda variant: variant.name)
@pytest.mark.parametrize(("joined", "chunks"), [(False, 1), (True, 1), (True, 2)])
def test_blocks_by_interpreted_kernels(
    variant: Variant, joined: bool, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built(variant).float()
    few: Grid = (1, 2, 3)
    expected = one_pass(model, variant, few)
    if joined:
        join_projections(model)
    fuse_blocks(model)
    taken: list[bool] = []

    def take(*tensors: Tensor | None) -> bool:
        taken.append(True)
        return True

    for module in (norms, rotary):
        monkeypatch.setattr(module, "kernels_take", take)
    with swap(model, "dense"), sliced_feed_forward([model], chunks):
        torch.testing.assert_close(one_pass(model, variant, few), expected, rtol=1e-5, atol=1e-5)
    # Of each block four norms and residuals, and three norms of q and k. In pieces there are the first norm,
    # again of v of the other heads, and the norm of q where text is attended to.
    assert len(taken) == len(model.blocks) * (5 + (3 * BATCH if chunks > 1 else 2))
