"""The indexer's scores by formula, its choice, also among equal scores, and chunks of tokens."""

import pytest
import torch

from attention.selected.indexer import IndexConfig, Indexer, index_scores, select
from attention.selected.rotary import Rotary
from attention.selected.span import Span


def test_scores_are_the_formula() -> None:
    q, keys = torch.randn(2, 3, 4, 5, dtype=torch.float64), torch.randn(2, 6, 5, dtype=torch.float64)
    weights = torch.randn(2, 3, 4, dtype=torch.float64)
    scores = index_scores(q, keys, weights)
    for b in range(2):
        for t in range(3):
            for j in range(6):
                terms = [max(float(q[b, t, h] @ keys[b, j]), 0.0) * weights[b, t, h] for h in range(4)]
                torch.testing.assert_close(scores[b, t, j], torch.stack(terms).sum())


def test_bfloat16_is_widened_first() -> None:
    q, keys, weights = torch.randn(1, 3, 4, 5), torch.randn(1, 6, 5), torch.randn(1, 3, 4)
    narrow = [x.bfloat16() for x in (q, keys, weights)]
    out = index_scores(*narrow)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, index_scores(*(x.float() for x in narrow)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("topk", [1, 3, 8, 20])
def test_the_highest_of_the_visible(topk: int, dtype: torch.dtype) -> None:
    """Of equal ones, -0 and 0 too, the first."""
    scores = torch.randint(-2, 3, (2, 9, 8)).to(dtype) * -0.37
    assert bool((scores.signbit() & (scores == 0)).any())
    visible = torch.arange(9).expand(2, 9).clone()
    visible[1, 3] = 0
    hidden = torch.arange(8) >= visible[:, :, None]
    chosen = select(scores.masked_fill(hidden, float("nan")), visible, topk)
    assert chosen.dtype == torch.int32
    assert chosen.shape == (2, 9, min(topk, 8))
    for b in range(2):
        for t in range(9):
            count = min(topk, int(visible[b, t]))
            listed = chosen[b, t].tolist()
            assert listed[count:] == [-1] * (len(listed) - count)
            assert len(set(listed[:count])) == count
            seen = scores[b, t, : visible[b, t]].tolist()
            assert listed[:count] == sorted(range(len(seen)), key=lambda place: -seen[place])[:count]


def test_chunks_of_tokens_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rotary = Rotary(2)
    sizes = IndexConfig(heads=3, head_dim=4, topk=2)
    module = Indexer(
        sizes, 5, 6, 2, rotary, overlap=True, eps=1e-6, simulate_quantization=False, dtype=torch.float64
    ).double()
    x, low_rank = torch.randn(2, 13, 5).double(), torch.randn(2, 13, 6).double()
    span = Span.following([0, 0], [13, 9], 13, "cpu")
    turns = rotary.turns(span.positions)
    whole = module(x, low_rank, turns, span, module.new_state(2, 13))
    monkeypatch.setattr("attention.selected.indexer._SCORE_BYTES", 2 * 3 * 6 * 4 * 5)
    assert torch.equal(module(x, low_rank, turns, span, module.new_state(2, 13)), whole)


@pytest.mark.parametrize("name", ["heads", "head_dim", "topk"])
def test_sizes_that_cannot_be(name: str) -> None:
    with pytest.raises(ValueError, match=f"index {name} must be at least 1, got 0"):
        IndexConfig(**{name: 0})
