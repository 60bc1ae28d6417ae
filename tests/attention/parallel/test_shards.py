"""Attention on 2, 3 and 4 ranks against one process, on random tensors."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention import AnchorLocalBackend, AnchorLocalPattern, Backend, RankGroup, TilePattern, WindowBackend
from attention.backends import TokenGrid
from attention.parallel.shards import Shards
from attention.parallel.support import anchored
from tests.ranks import RankPool

SCALE = 0.3
HEADS, HEAD_DIM = 12, 16


def inputs(tokens: int, batch: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    size = (batch, tokens, HEADS, HEAD_DIM)
    return [torch.randn(size, generator=generator).to(dtype) for _ in range(3)]


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, scale=SCALE).transpose(1, 2)


def alone(
    backend: Backend, grid: TokenGrid, text: int, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Sparse and dense attention in the caller's order, in one process."""
    plan = backend.plan(grid)
    assert plan is not None
    order = plan.order(q.device)
    if order is None:
        return plan.attend(q, k, v, SCALE, 0, text), dense(q, k, v)
    first = torch.arange(text)
    there, back = torch.cat([first, order.order + text]), torch.cat([first, order.inverse + text])
    ordered = plan.attend(q[:, there], k[:, there], v[:, there], SCALE, 0, text)
    return ordered[:, back], dense(q, k, v)


def on_rank(
    ranks: RankGroup, backend: Backend, grid: TokenGrid, text: int, batch: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, list[int]]:
    """The same of this rank's tokens, put together again; and the bytes received in each call."""
    plan = backend.plan(grid)
    assert plan is not None
    shards = Shards(ranks, grid, anchored(plan))
    order = shards.order(torch.device("cpu"))
    q, k, v = inputs(text + grid.tokens, batch, dtype)
    mine = torch.cat([torch.arange(text), order.order + text])
    q, k, v = (x[:, mine] for x in (q, k, v))
    before = ranks.received_bytes
    if shards.anchored:
        sparse = shards.by_anchors(q, k, v, SCALE, text)
    else:
        sparse = shards.by_heads(lambda q, k, v: plan.attend(q, k, v, SCALE, 0, text), q, k, v, text)
    between = ranks.received_bytes
    full = shards.by_heads(dense, q, k, v, text)
    received = [between - before, ranks.received_bytes - between]
    return _whole(shards, sparse, text), _whole(shards, full, text), received


def _whole(shards: Shards, out: Tensor, text: int) -> Tensor:
    order = shards.order(out.device)
    assert order.gather is not None
    rows = order.gather(out[:, text:].flatten(2))[:, order.inverse]
    return torch.cat([out[:, :text], rows.unflatten(2, out.shape[2:])], dim=1)


CASES: dict[str, Backend] = {
    "raster": AnchorLocalBackend(AnchorLocalPattern(50, 7, 3)),
    "tile": AnchorLocalBackend(TilePattern((2, 3, 4), 5, 2)),
    "rotated": AnchorLocalBackend(AnchorLocalPattern(64, 17), anchor_rotation=True).at_step(20),
    "one block": AnchorLocalBackend(AnchorLocalPattern(10_000, 7)),
    "no anchors": AnchorLocalBackend(AnchorLocalPattern(30, 1000, 999)),
    "few anchors": AnchorLocalBackend(AnchorLocalPattern(30, 300)),
    "window": WindowBackend((1, 0), "frames", 1),
}
GRID = TokenGrid(5, 9, 11)


@pytest.mark.parametrize("text", [0, 6])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("case", CASES)
def test_ranks_equal_one_process(pool: RankPool, case: str, ranks: int, text: int) -> None:
    backend = CASES[case]
    expected = alone(backend, GRID, text, *inputs(text + GRID.tokens, 2, torch.float32))
    for *outs, received in pool.run(ranks, on_rank, backend, GRID, text, 2, torch.float32):
        for out, one in zip(outs, expected, strict=True):
            torch.testing.assert_close(out, one, rtol=1e-5, atol=1e-5)
        assert min(received) > 0 or case == "no anchors"


@pytest.mark.parametrize("grid", [TokenGrid(1, 1, 4), TokenGrid(1, 7, 1), TokenGrid(3, 5, 7)], ids=str)
def test_small_clips(pool: RankPool, grid: TokenGrid) -> None:
    backend = AnchorLocalBackend(AnchorLocalPattern(3, 2))
    expected = alone(backend, grid, 0, *inputs(grid.tokens, 1, torch.float64))
    for *outs, _ in pool.run(4, on_rank, backend, grid, 0, 1, torch.float64):
        for out, one in zip(outs, expected, strict=True):
            torch.testing.assert_close(out, one, rtol=1e-12, atol=1e-12)


def test_bfloat16_rounds_like_one_process(pool: RankPool) -> None:
    backend = CASES["raster"]
    exact, _ = alone(backend, GRID, 6, *inputs(6 + GRID.tokens, 1, torch.float32))
    rounded, _ = alone(backend, GRID, 6, *inputs(6 + GRID.tokens, 1, torch.bfloat16))
    budget = 2 * (rounded - exact).abs().max()
    for out, *_ in pool.run(4, on_rank, backend, GRID, 6, 1, torch.bfloat16):
        assert out.dtype == torch.bfloat16
        assert (out - exact).abs().max() <= budget


def test_the_kernel_runs_on_a_share(pool: RankPool) -> None:
    backend = AnchorLocalBackend(AnchorLocalPattern(50, 7), impl="triton")
    plain = AnchorLocalBackend(AnchorLocalPattern(50, 7))
    expected, _ = alone(plain, GRID, 0, *inputs(GRID.tokens, 1, torch.float32))
    for out, *_ in pool.run(2, on_rank, backend, GRID, 0, 1, torch.float32):
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_received_bytes_are_those_of_the_formulas(pool: RankPool) -> None:
    """Blocks of a frame on 2 ranks with 4 frames: nothing is cut."""
    grid, ranks = TokenGrid(4, 8, 8), 2
    backend = AnchorLocalBackend(AnchorLocalPattern(64, 16))
    anchors, own, token = 256 // 16, 256 // ranks, HEADS * HEAD_DIM * 4
    for *_, received in pool.run(ranks, on_rank, backend, grid, 0, 1, torch.float32):
        gathered = 3 * anchors // ranks * token
        merged = anchors // ranks * (token + HEADS * 4)
        heads = 4 * own * token // ranks  # q, k, v there, and the result back
        assert received == [gathered + merged, heads]


def with_grouped_heads(ranks: RankGroup) -> None:
    shards = Shards(ranks, GRID, None)
    q, k, v = inputs(shards.order(torch.device("cpu")).order.numel(), 1, torch.float32)
    shards.by_heads(dense, q, k[:, :, :4], v[:, :, :4], 0)


def test_grouped_queries_are_refused(pool: RankPool) -> None:
    with pytest.raises(AssertionError, match="as many key heads as query heads, got 4 and 12"):
        pool.run(2, with_grouped_heads)
