"""What only a GPU can show: full sizes, capture, no new kernels. Run with ``pytest -m gpu`` here."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attention import BoxPattern, block_topk_ordered, box_layout
from attention.block_topk import hopper, triton_impl, triton_selection
from attention.block_topk.api import implementation, kernel
from attention.block_topk.layout import BoxLayout
from attention.block_topk.selection import box_means, box_scores, kept_counts, kept_pairs, selected_boxes
from attention.block_topk.triton_selection import box_means_triton, key_lists
from attention.choice import Impl, is_hopper
from tests.attention.block_topk.helpers import Case, budget, exact, inputs, relative_error, selection

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
hopper_only = pytest.mark.skipif(
    torch.cuda.is_available() and not is_hopper(CUDA), reason="Hopper's own kernel"
)


def random_inputs(layout: BoxLayout, heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    size = (1, layout.tokens, heads, head_dim)
    q, k, v = (torch.randn(size, device=CUDA, dtype=torch.bfloat16) for _ in range(3))
    return q, k, v


@pytest.mark.parametrize("boxes", [1, 2, 33, 257, 600, 2048])
def test_choice_is_that_of_pytorch_for_many_boxes(boxes: int) -> None:
    layout = box_layout(BoxPattern(block_size=50), (1, 1, 50 * boxes - 7), CUDA)
    scores = torch.randint(-20, 20, (1, 3, boxes, boxes), device=CUDA).float()  # many ties
    for top_k in (1, 0.2, 0.9):
        tally = torch.zeros((), dtype=torch.int64, device=CUDA)
        lists = key_lists(scores, layout, top_k, 128, pooled_rest=True, tally=tally)
        selected = selected_boxes(scores, layout.always, kept_counts(layout, top_k)[0])
        assert lists.rest_bias is not None
        assert torch.equal(lists.rest_bias.isinf().view_as(selected), selected)
        assert int(tally) == int(kept_pairs(selected, layout))
        keys = torch.where(selected, layout.bounds.diff(), 0).sum(-1).flatten()
        is_listed = torch.arange(lists.partial.shape[1], device=CUDA) < lists.counts[:, 1:]
        assert torch.equal(
            lists.counts[:, 0] * 128 + torch.where(is_listed, lists.partial[..., 1], 0).sum(-1), keys
        )


# Descriptors, pointers, and Hopper's own kernel.
@pytest.mark.parametrize(
    ("heads", "head_dim", "impl"), [(32, 128, "triton"), (48, 96, "triton"), (32, 128, "auto")]
)
def test_more_than_2_to_the_31_elements(heads: int, head_dim: int, impl: Impl) -> None:
    layout = box_layout(BoxPattern(block_size=1000), (1, 1, 530_001), CUDA)
    assert layout.tokens * heads * head_dim > 2**31
    q, k, v = random_inputs(layout, heads, head_dim)
    scale = head_dim**-0.5
    out = torch.full_like(q, float("nan"))
    run = kernel(implementation(impl, q))
    run(q, k, v, layout, top_k=0.05, pooled_rest=False, scale=scale, tally=None, out=out)
    assert bool(out.isfinite().all())
    q_means, k_means = box_means_triton(q, layout), box_means_triton(k, layout)
    torch.testing.assert_close(k_means[:, -1:], box_means(k[:, :, -1:], layout), rtol=1e-4, atol=1e-5)
    scores = box_scores(q_means, k_means, scale)
    selected = selected_boxes(scores, layout.always, kept_counts(layout, 0.05)[0])
    rows = torch.tensor([0, layout.tokens // 2, layout.tokens - 1], device=CUDA)
    box = torch.arange(layout.tokens, device=CUDA) // 1000
    for head in (0, heads - 1):
        seen = selected[0, head][box[rows]][:, box]
        logits = (q[0, rows, head].double() @ k[0, :, head].double().T * scale).masked_fill(
            ~seen, float("-inf")
        )
        truth = logits.softmax(-1) @ v[0, :, head].double()
        error = (out[0, rows, head].double() - truth).norm() / truth.norm()
        assert error < 2**-7  # one rounding of weights and of outputs in bfloat16


@pytest.mark.parametrize("impl", ["auto", "triton"])
def test_a_call_can_be_captured_and_waits_for_nothing(impl: Impl) -> None:
    layout = box_layout(BoxPattern((3, 6, 8), anchor_stride=32), (9, 18, 24), CUDA, text=77)
    q, k, v = random_inputs(layout, 4, 128)
    tally = torch.zeros((), dtype=torch.int64, device=CUDA)

    def run() -> Tensor:
        return block_topk_ordered(q, k, v, layout, top_k=0.3, pooled_rest=True, tally=tally, impl=impl)

    expected = run()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):  # an operation that waits cannot be captured
        out = run()
    q.copy_(q.flip(2))
    k.copy_(k.flip(2))
    v.copy_(v.flip(2))
    tally.zero_()
    graph.replay()
    assert torch.equal(out.flip(2), expected)
    counted = int(tally)
    tally.zero_()
    run()
    assert int(tally) == counted > 0


@pytest.mark.parametrize("impl", ["auto", "triton"])
def test_new_lengths_compile_nothing(impl: Impl) -> None:
    selecting = (triton_selection._mean_kernel, triton_selection._list_kernel)
    kernels = (triton_impl._block_topk_kernel, hopper._kernel, *selecting)

    def compiled_after(tokens: int, size: int, text: int) -> int:
        layout = box_layout(BoxPattern(block_size=size, anchor_stride=9), (1, 1, tokens), CUDA, text)
        q, k, v = random_inputs(layout, 3, 128)
        block_topk_ordered(q, k, v, layout, top_k=0.5, pooled_rest=True, impl=impl)
        return sum(len(cache[0]) for each in kernels for cache in each.device_caches.values())

    before = compiled_after(4096, 256, 16)
    for tokens, size, text in ((4097, 256, 1), (5000, 257, 0), (2048, 128, 32), (100, 100, 3)):
        assert compiled_after(tokens, size, text) == before


# Tiles have 128 keys, items 128 or 192 queries: boxes around that, groups without queries, all sorts of tiles
HOPPER_CASES = (
    Case((3, 4, 5), 3, tile_thw=(2, 2, 3), kv_heads=1),
    Case((3, 10, 13), 0.3, tile_thw=(3, 5, 7), kv_heads=1, batch=2, pooled_rest=True),
    Case((3, 10, 13), 0.3, tile_thw=(3, 5, 3), anchor_stride=5, text=3, pooled_rest=True),
    Case((1, 40, 66), 3, block_size=401, heads=3, kv_heads=3),
    Case((1, 16, 24), 0.4, block_size=128),  # whole tiles only
    Case((2, 3, 4), 2, block_size=5, anchor_stride=1, pooled_rest=True),  # all anchors: dense
    Case((2, 3, 3), 1, tile_thw=(4, 4, 4), pooled_rest=True),  # one box: dense
    Case((1, 9, 31), 5, block_size=2, text=140, pooled_rest=True),  # more boxes than a tile has keys
)
# Few variants, since each takes seconds to compile.
HOPPER_RUNS = [
    *((case, head_dim, torch.bfloat16) for head_dim in (128, 64) for case in HOPPER_CASES),
    (HOPPER_CASES[1], 128, torch.float16),
]


def run_on_hopper(
    case: Case, q: Tensor, k: Tensor, v: Tensor, layout: BoxLayout, out: Tensor | None = None
) -> Tensor:
    """Hopper's kernel on ordered tokens."""
    assert implementation("auto", q) == "gluon"
    run = kernel("gluon")
    return run(
        q,
        k,
        v,
        layout,
        top_k=case.top_k,
        pooled_rest=case.pooled_rest,
        scale=case.scale,
        tally=None,
        out=out,
    )


@hopper_only
@pytest.mark.parametrize(("case", "head_dim", "dtype"), HOPPER_RUNS, ids=str)
def test_hopper_kernel_is_the_definition(case: Case, head_dim: int, dtype: torch.dtype) -> None:
    case = replace(case, head_dim=head_dim)
    q, k, v = inputs(case, dtype)
    _, selected = selection(case, q, k, "triton")
    truth = exact(case, q, k, v, selected)
    allowed = budget(case, q, k, v, selected, truth)
    layout = case.layout()
    q, k, v = (x.index_select(1, layout.order) for x in (q, k, v))
    out = torch.full_like(q, float("nan"))
    run_on_hopper(case, q, k, v, layout, out)
    assert relative_error(out.index_select(1, layout.inverse), truth) <= allowed


@hopper_only
@pytest.mark.parametrize(("head_dim", "pooled_rest"), [(64, False), (128, True)])
def test_hopper_kernel_at_full_size_repeats_and_can_be_captured(head_dim: int, pooled_rest: bool) -> None:
    """Beside the kernel for all GPUs; whoever takes which item changes no bit."""
    case = Case((21, 30, 52), 0.2, (7, 8, 9), head_dim=head_dim, heads=6, kv_heads=3, pooled_rest=pooled_rest)
    layout = case.layout()
    rows = torch.randn(1, layout.tokens, 12, head_dim, device=CUDA, dtype=torch.bfloat16)
    q, k, v = rows.split([6, 3, 3], dim=2)  # heads side by side in longer rows
    out = torch.full_like(q, float("nan"))
    run_on_hopper(case, q, k, v, layout, out)
    expected = block_topk_ordered(q, k, v, layout, top_k=case.top_k, pooled_rest=pooled_rest, impl="triton")
    assert relative_error(out, expected.double()) < 2**-7  # both round weights and results
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run_on_hopper(case, q, k, v, layout)
    for _ in range(5):
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, out)


@hopper_only
def test_what_no_descriptor_describes_is_copied() -> None:
    layout = box_layout(BoxPattern(block_size=300), (1, 1, 3_001), CUDA)
    q, odd, v = torch.randn(3, 1, 3_001, 2, 129, device=CUDA).bfloat16()[..., 1:]  # rows from odd places
    assert torch.equal(
        block_topk_ordered(q, odd, v, layout, top_k=3),
        block_topk_ordered(q.contiguous(), odd.contiguous(), v.contiguous(), layout, top_k=3),
    )
