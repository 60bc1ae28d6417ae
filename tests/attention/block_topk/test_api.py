import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attention import BlockTopKBackend, BoxPattern, block_topk_attention, block_topk_ordered, box_layout
from attention.backends import TokenGrid
from attention.block_topk.api import implementation, kernel
from attention.block_topk.hopper import block_topk_hopper
from attention.block_topk.triton_impl import block_topk_triton
from attention.choice import Impl

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


@pytest.mark.parametrize(
    ("impl", "dtype", "head_dim", "on_hopper", "elsewhere"),
    [
        ("auto", torch.bfloat16, 128, "gluon", "triton"),
        ("auto", torch.float16, 64, "gluon", "triton"),
        ("auto", torch.bfloat16, 96, "triton", "triton"),
        ("auto", torch.float32, 128, "triton", "triton"),
        ("triton", torch.bfloat16, 128, "triton", "triton"),
        ("torch", torch.bfloat16, 128, "torch", "torch"),
        ("reference", torch.bfloat16, 128, "reference", "reference"),
    ],
)
def test_what_runs_on_a_gpu(
    impl: Impl,
    dtype: torch.dtype,
    head_dim: int,
    on_hopper: str,
    elsewhere: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For tensors that only say that they are on one."""
    with FakeTensorMode():
        q = torch.empty(1, 24, 2, head_dim, dtype=dtype, device="cuda")
    for is_hopper, expected in ((True, on_hopper), (False, elsewhere)):
        monkeypatch.setattr("attention.hopper_limits.is_hopper", lambda _, found=is_hopper: found)
        assert implementation(impl, q) == expected
        if impl != "reference":
            plan = BlockTopKBackend(BoxPattern(block_size=4), 1, impl=impl).plan(TokenGrid(*GRID))
            assert plan.implementation(q) == expected


def test_each_kernel_by_its_name() -> None:
    assert implementation("auto", Q) == "torch"
    assert kernel("triton") is block_topk_triton
    assert kernel("gluon") is block_topk_hopper
