import pytest
import torch

from attention import BlockTopKBackend, BoxPattern, block_topk_attention, block_topk_ordered, box_layout

Q = torch.randn(2, 24, 4, 16)
K = torch.randn(2, 24, 2, 16)
GRID = (2, 3, 4)


@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        (Q[0], K, K, r"q must be \[batch, tokens, heads, head_dim\], got shape \(24, 4, 16\)"),
        (Q, K.double(), K, "share dtype and device"),
        (Q.int(), K.int(), K.int(), r"must be floating point, got torch\.int32"),
        (Q, K, K[:, :10], "k and v must have one shape"),
        (Q[:, :10], K, K, "share batch, tokens and head_dim"),
        (Q[:, :, :3], K, K, "heads must be a multiple of kv_heads, got 3 and 2"),
        (Q[:, :0], K[:, :0], K[:, :0], "no dimension may be empty"),
        (torch.zeros(1, 24, 1, 264),) * 3 + ("head_dim must be at most 256, got 264",),
        (Q[:, :23], K[:, :23], K[:, :23], "q must have text=0 tokens and a clip of 2 x 3 x 4, got 23 tokens"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        block_topk_attention(q, k, v, grid=GRID, block_size=4, top_k=1)


@pytest.mark.parametrize("top_k", [0, -1, 1.5, float("nan"), float("inf")])
def test_top_k_is_a_share_or_a_count(top_k: float) -> None:
    message = "top_k must be a share of the boxes, above 0 and below 1, or a whole number of them"
    with pytest.raises(ValueError, match=message):
        block_topk_attention(Q, K, K, grid=GRID, block_size=4, top_k=top_k)
    with pytest.raises(ValueError, match=message):
        BlockTopKBackend(BoxPattern(block_size=4), top_k)


def test_the_ordered_form_checks_its_layout_and_tally() -> None:
    layout = box_layout(BoxPattern(block_size=4), GRID, Q.device)
    with pytest.raises(ValueError, match="the layout is for 24 tokens, got 20"):
        block_topk_ordered(Q[:, :20], K[:, :20], K[:, :20], layout, top_k=1)
    with pytest.raises(ValueError, match="defined on the caller's order"):
        block_topk_ordered(Q, K, K, layout, top_k=1, impl="reference")
    with pytest.raises(ValueError, match=r"tally must be int64 \[\] on cpu, got torch\.int32"):
        block_topk_ordered(Q, K, K, layout, top_k=1, tally=torch.zeros((), dtype=torch.int32))
    with pytest.raises(ValueError, match="impl='reference' cannot be swapped in"):
        BlockTopKBackend(BoxPattern(block_size=4), 1, impl="reference")
    with pytest.raises(ValueError, match="scale must be positive and finite"):
        block_topk_attention(Q, K, K, grid=GRID, block_size=4, top_k=1, scale=0.0)
