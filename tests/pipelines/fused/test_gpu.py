"""Fused blocks on a GPU: kernels, compiled and eager, at the widths of real models."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from diffusers import WanTransformer3DModel
from torch import Tensor
from torch._dynamo.utils import counters

from attention import swap
from pipelines.compiling import RepeatedBlocks
from pipelines.feed_forward import sliced_feed_forward
from pipelines.fp8 import NEEDED_CAPABILITY, to_fp8
from pipelines.fused import kernels, projection
from pipelines.fused.wan import fuse_blocks
from pipelines.joined_attention import join_projections

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Inductor itself uses what PyTorch deprecates.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
HEAD_DIM = 128


@pytest.fixture(autouse=True)
def _own_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def built(heads: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return WanTransformer3DModel(
            num_attention_heads=heads,
            attention_head_dim=HEAD_DIM,
            in_channels=4,
            out_channels=4,
            text_dim=64,
            freq_dim=32,
            ffn_dim=512,
            num_layers=2,
        ).eval()


def one_pass(model: Any, frames: int, of_each_token: bool) -> Tensor:
    weight = model.patch_embedding.weight
    generator = torch.Generator().manual_seed(frames)
    timestep = torch.full((1,), 500.0)
    out: Tensor = model(
        hidden_states=torch.randn(1, 4, frames, 16, 24, generator=generator).to(weight),
        timestep=(timestep[:, None].expand(1, frames * 8 * 12) if of_each_token else timestep).to(
            weight.device
        ),
        encoder_hidden_states=torch.randn(1, 9, 64, generator=generator).to(weight),
        return_dict=False,
    )[0]
    return out


def count_launches(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    launched = {"add_norm_triton": 0, "rms_norm_triton": 0}

    def count(name: str) -> None:
        launch = getattr(kernels, name)

        def counted(*arguments: Any) -> None:
            launched[name] += 1
            launch(*arguments)

        monkeypatch.setattr(kernels, name, counted)

    for name in launched:
        count(name)
    return launched


@pytest.mark.parametrize("heads", [3, 12])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("of_each_token", [False, True])
def test_bfloat16_is_as_near_to_float64_as_stock(
    heads: int, joined: bool, compiled: bool, of_each_token: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built(heads)
    truths = [one_pass(model.double(), frames, of_each_token) for frames in (3, 5)]
    model = model.to("cuda", torch.bfloat16)
    stock = [one_pass(model, frames, of_each_token) for frames in (3, 5)]
    launched = count_launches(monkeypatch)
    if joined:
        join_projections(model)
    fuse_blocks(model)
    if compiled:
        RepeatedBlocks(list(model.blocks), torch.device("cuda"), "on")
    with swap(model, "dense"), sliced_feed_forward([model], 2):
        found = [one_pass(model, frames, of_each_token) for frames in (3, 5)]
    for ours, theirs, truth in zip(found, stock, truths, strict=True):
        errors = [float((x.cpu().double() - truth).norm() / truth.norm()) for x in (ours, theirs)]
        assert errors[0] < 1.2 * errors[1]
    # Of each block and pass: four norms and residuals; q with k, and both of the text's. Where q, k and v are
    # one layer, the first norm is made once more, for v of the other heads.
    assert launched == {"add_norm_triton": (5 if joined else 4) * 4, "rms_norm_triton": 3 * 4}
    if compiled:
        assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("of_each_token", [False, True])
def test_fp8_is_as_near_to_float64_as_stock_in_fp8(
    joined: bool, compiled: bool, of_each_token: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.get_device_capability() < NEEDED_CAPABILITY:
        pytest.skip("needs a GPU that multiplies fp8 matrices")
    model = built(12)
    truths = [one_pass(model.double(), frames, of_each_token) for frames in (3, 5)]
    model = model.to("cuda", torch.bfloat16)
    if joined:
        join_projections(model)
    to_fp8(model.blocks)
    with swap(model, "dense"), sliced_feed_forward([model], 2):
        stock = [one_pass(model, frames, of_each_token) for frames in (3, 5)]
    launched = count_launches(monkeypatch)
    fuse_blocks(model)
    if compiled:
        RepeatedBlocks(list(model.blocks), torch.device("cuda"), "on")
    with swap(model, "dense"), sliced_feed_forward([model], 2):
        found = [one_pass(model, frames, of_each_token) for frames in (3, 5)]
    for ours, theirs, truth in zip(found, stock, truths, strict=True):
        errors = [float((x.cpu().double() - truth).norm() / truth.norm()) for x in (ours, theirs)]
        assert errors[0] < 1.2 * errors[1]
    assert launched == {"add_norm_triton": 4 * 4, "rms_norm_triton": 3 * 4}
    if compiled:
        assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("compiled", [False, True])
def test_a_lean_block_needs_less_than_four_times_its_hidden_states(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They, q, k, v of half of the heads and chunks."""
    monkeypatch.setattr(projection, "CHUNK_TOKENS", 4096)
    model = built(12).to("cuda", torch.bfloat16)
    join_projections(model)
    fuse_blocks(model)
    block = model.blocks[1]
    before: list[int] = []
    needed: list[float] = []

    def begin(module: Any, args: Any) -> None:
        torch.cuda.reset_peak_memory_stats()
        before.append(torch.cuda.memory_allocated())

    def end(module: Any, args: Any, out: Tensor) -> None:
        given: Tensor = args[0]
        needed.append(1 + (torch.cuda.max_memory_allocated() - before[-1]) / given.nbytes)

    if compiled:
        RepeatedBlocks(list(model.blocks), torch.device("cuda"), "on")
    block.register_forward_pre_hook(begin)
    block.register_forward_hook(end)
    with swap(model, "anchor_local", block_size=96 * 16, anchor_stride=32), sliced_feed_forward([model], 8):
        for _ in range(2):  # the first pass makes what stays: layouts, and a workspace for products
            one_pass(model, 400, False)
    assert 3.4 < needed[-1] < 3.75


def test_patches_come_token_by_token() -> None:
    """What the blocks' kernels take; otherwise the first block would run without them."""
    model = built(3).to("cuda", torch.bfloat16)
    latents = torch.randn(1, model.config.in_channels, 3, 16, 24, device="cuda", dtype=torch.bfloat16)
    expected = model.patch_embedding(latents)
    fuse_blocks(model)
    found = model.patch_embedding(latents)
    torch.testing.assert_close(found, expected)
    assert found.flatten(2).transpose(1, 2).is_contiguous()
