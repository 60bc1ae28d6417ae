"""The contract of sparse_attn: what it refuses, checked mode, compiled graphs."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from attention.choice import Impl
from attention.selected.api import implementation, sparse_attn
from attention.selected.hopper_limits import hopper_takes
from tests.attention.selected.helpers import DEVICE, Case, inputs, run

CASE = Case(heads=4, width=16, rows=9, listed=5, batch=2)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": torch.zeros(3, 4, 16)}, r"q must be \[batch, queries, heads, d\], got shape \(3, 4, 16\)"),
        ({"q": torch.zeros(2, 3, 4, 16, dtype=torch.int32)}, "q must be floating point, got torch.int32"),
        ({"q": torch.zeros(2, 3, 4, 577)}, "1 <= d <= 576, got 4 and 577"),
        ({"kv": torch.zeros(2, 9, 8)}, r"kv must be .* = \[2, rows, 16\], got \(2, 9, 8\)"),
        ({"kv": torch.zeros(1, 9, 16)}, r"kv must be .* = \[2, rows, 16\], got \(1, 9, 16\)"),
        ({"kv": torch.zeros(2, 9, 16).half()}, "share their dtype, got torch.float32 and torch.float16"),
        ({"sink": torch.zeros(3)}, r"sink must be float32 of shape \[heads\] = \[4\]"),
        ({"sink": torch.zeros(4).bfloat16()}, r"got torch.bfloat16 of \(4,\)"),
        (
            {"topk_idxs": torch.zeros(2, 3, 5, dtype=torch.int64)},
            "topk_idxs must be int32 .* got torch.int64",
        ),
        ({"topk_idxs": torch.zeros(2, 4, 5, dtype=torch.int32)}, r"= \[2, 3, k\], got torch.int32"),
        ({"sink": torch.zeros(4, device="meta")}, "sink must be on the device of q, cpu, got meta"),
        ({"scale": 0.0}, "scale must be positive and finite, got 0.0"),
        ({"impl": "fast"}, "impl must be one of auto, reference, torch, triton, got 'fast'"),
    ],
)
def test_what_does_not_fit_is_named(changed: dict[str, Any], message: str) -> None:
    x = inputs(CASE, torch.float32)
    arguments = {"q": x.q, "kv": x.kv, "sink": x.sink, "topk_idxs": x.topk_idxs} | changed
    with pytest.raises(ValueError, match=message):
        sparse_attn(**arguments)


@pytest.mark.parametrize("wrong", [-2, 9, 2**31 - 1, -(2**31)])
def test_an_index_that_is_no_row(wrong: int) -> None:
    """Refused if checked; else it lists no key, in every implementation."""
    x = inputs(CASE, torch.float32, DEVICE)
    with_it, without = x.topk_idxs.clone(), x.topk_idxs.clone()
    with_it[1, 0, 3], without[1, 0, 3] = wrong, -1
    with pytest.raises(ValueError, match=rf"-1 or a row 0 .. 8, got {wrong} at \[1, 0, 3\]"):
        sparse_attn(x.q, x.kv, x.sink, with_it, checked=True)
    impls: tuple[Impl, ...] = ("reference", "torch", "triton")
    for impl in impls:
        out = run(replace(x, topk_idxs=with_it), impl)
        assert torch.equal(out, run(replace(x, topk_idxs=without), impl))


@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
def test_a_sink_that_is_no_logit(wrong: float) -> None:
    x = inputs(CASE, torch.float32)
    x.sink[2] = wrong
    with pytest.raises(ValueError, match=r"sink must be finite or -inf, got .* at \[\d+\]"):
        sparse_attn(x.q, x.kv, x.sink, x.topk_idxs, checked=True)


def test_checked_passes_what_is_right() -> None:
    x = inputs(CASE, torch.float32)
    assert torch.equal(sparse_attn(x.q, x.kv, x.sink, x.topk_idxs, checked=True), run(x, "auto"))


def test_compiles_without_a_graph_break() -> None:
    x = inputs(CASE, torch.float32, DEVICE)

    def attend(q: torch.Tensor) -> torch.Tensor:
        return 2 * sparse_attn(q + 1, x.kv, x.sink, x.topk_idxs, 0.3)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x.q), attend(x.q))
    torch.library.opcheck(
        torch.ops.reelwright.sparse_attn.default,
        (x.q, x.kv, x.sink, x.topk_idxs, 0.3, "torch", False),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_triton_needs_a_gpu_or_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x = inputs(CASE, torch.float32)
    with pytest.raises(ValueError, match="needs CUDA tensors"):
        run(x, "triton")


def test_what_the_kernel_of_hopper_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two widths in 16 bits, whose rows start at multiples of 16 bytes; nothing where there is no Hopper."""
    x = inputs(Case(heads=3, width=512, rows=9, listed=5), torch.bfloat16)
    assert not hopper_takes(x.q, x.kv)
    monkeypatch.setattr("attention.selected.hopper_limits.is_hopper", lambda _: True)
    assert hopper_takes(x.q, x.kv)
    assert hopper_takes(x.q.transpose(1, 2).half(), x.kv[:, 1:].half())
    assert not hopper_takes(x.q.float(), x.kv.float())
    assert not hopper_takes(x.q[..., :448], x.kv[..., :448])
    wider = torch.cat([x.kv, x.kv], dim=2)
    assert hopper_takes(x.q, wider[..., 8:520])
    assert not hopper_takes(x.q, wider[..., 1:513])
    assert not hopper_takes(x.q, wider[..., :516].contiguous()[..., :512])
    assert not hopper_takes(x.q, wider[..., ::2])


def test_what_runs_is_named() -> None:
    x = inputs(CASE, torch.float32, DEVICE)
    assert implementation("auto", x.q, x.kv) == ("triton" if DEVICE == "cuda" else "torch")
    assert implementation("triton", x.q, x.kv) == "triton"
    assert implementation("reference", x.q, x.kv) == "reference"
