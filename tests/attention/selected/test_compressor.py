"""The compressor: against its formula, in portions, and what it leaves of a sequence."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attention.selected.compressor import Compressor, CompressorState
from attention.selected.rotary import Rotary
from attention.selected.span import Span
from tests.attention.selected import formulas

DIM, WIDTH, ROTARY, EPS = 6, 8, Rotary(4, 100.0), 1e-6
KINDS = pytest.mark.parametrize(
    ("ratio", "overlap"), [(4, True), (4, False), (1, True), (1, False), (3, True)]
)


def compressor(ratio: int, overlap: bool) -> Compressor:
    """With random parameters; the positional gates are as large as what they are added to."""
    module = Compressor(DIM, WIDTH, ratio, ROTARY, overlap=overlap, eps=EPS).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return module


def tokens(length: int, batch: int = 1) -> Tensor:
    return torch.randn(batch, length, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def run(module: Compressor, x: Tensor, start: int, state: CompressorState) -> Tensor:
    span = Span.following([start] * len(x), [x.shape[1]] * len(x), x.shape[1], "cpu")
    entries: Tensor = module(x, span, state)
    return entries


@KINDS
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 11, 12])
def test_equals_the_formula(ratio: int, overlap: bool, length: int) -> None:
    module = compressor(ratio, overlap)
    x = tokens(length)
    out = run(module, x, 0, module.new_state(1))
    expected = formulas.entries(x[0], module.state_dict(), "", ratio, overlap, ROTARY, EPS)
    assert out.shape == (1, length // ratio, WIDTH)
    torch.testing.assert_close(out[0], expected)


@KINDS
def test_one_by_one_equals_all_at_once(ratio: int, overlap: bool) -> None:
    module = compressor(ratio, overlap)
    x = tokens(14, batch=2)
    expected, state = run(module, x, 0, module.new_state(2)), module.new_state(2)
    emitted = [run(module, x[:, i : i + 1], i, state) for i in range(14)]
    assert [out.shape[1] for out in emitted] == [int((i + 1) % ratio == 0) for i in range(14)]
    torch.testing.assert_close(torch.cat(emitted, dim=1), expected)


def test_the_gate_alone_has_the_position() -> None:
    """Gates that only a position sets: an entry is that token's row, normalised."""
    module = compressor(3, overlap=False)
    module.wgate.weight.zero_()
    module.ape.zero_()
    module.ape[1] = 1e4
    x = tokens(6)
    out = run(module, x, 0, module.new_state(1))[0]
    for window, token in enumerate((1, 4)):
        row = formulas.rms(x[0, token] @ module.wkv.weight.T, module.norm.weight, EPS)
        torch.testing.assert_close(out[window], formulas.turned(row, 3 * window, ROTARY))


def test_each_half_of_the_channels_has_its_window() -> None:
    """Equal gates: the mean of the window before, first half of channels, and its own, second half."""
    module = compressor(2, overlap=True)
    module.wgate.weight.zero_()
    module.ape.zero_()
    x = tokens(4)
    rows = x[0] @ module.wkv.weight.T
    out = run(module, x, 0, module.new_state(1))[0]
    first = rows[:2, WIDTH:].mean(0)  # no window before, and no zeros in its place
    second = torch.cat([rows[:2, :WIDTH], rows[2:, WIDTH:]]).mean(0)
    for window, pooled in enumerate((first, second)):
        row = formulas.rms(pooled, module.norm.weight, EPS)
        torch.testing.assert_close(out[window], formulas.turned(row, 2 * window, ROTARY))


def test_a_new_sequence_starts_without_the_other_half() -> None:
    """A prompt shorter than a window, behind a sequence that left a finished one."""
    module = compressor(4, overlap=True)
    x = tokens(11)
    state = module.new_state(1)
    run(module, tokens(9) + 1, 0, state)
    state.reset()
    short = run(module, x[:, :3], 0, state)
    assert short.shape[1] == 0
    out = run(module, x[:, 3:], 3, state)
    torch.testing.assert_close(out, run(module, x, 0, module.new_state(1)))


def test_sequences_of_a_batch_at_their_own_places() -> None:
    module = compressor(4, overlap=True)
    x = tokens(20, batch=3)
    whole = run(module, x, 0, module.new_state(3))
    state, starts = module.new_state(3), [0, 0, 0]
    for counts in ([3, 4, 0], [1, 6, 9], [9, 0, 1], [1, 1, 1]):
        part = torch.full((3, max(counts), DIM), float("nan"), dtype=torch.float64)
        for i, (start, count) in enumerate(zip(starts, counts, strict=True)):
            part[i, :count] = x[i, start : start + count]
        span = Span.following(starts, counts, max(counts), "cpu")
        out = module(part, span, state)
        for i, closed in enumerate(span.closed_windows(4)):
            first = starts[i] // 4
            torch.testing.assert_close(out[i, :closed], whole[i, first : first + closed])
            assert bool((out[i, closed:] == 0).all())
        starts = list(span.ends)


def test_projections_are_float32_whatever_the_tokens_are() -> None:
    """Entries of bfloat16 tokens are those of the same values in float32, rounded once."""
    module = compressor(4, overlap=True).float()
    x = tokens(12).bfloat16()
    out = run(module, x, 0, module.new_state(1))
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, run(module, x.float(), 0, module.new_state(1)).bfloat16())


def test_a_state_is_its_own() -> None:
    module = compressor(4, overlap=True)
    state, other = module.new_state(1), module.new_state(1)
    run(module, tokens(7), 0, state)
    assert torch.equal(other.kv, module.new_state(1).kv)
    copied = replace(state, kv=state.kv.clone(), gate=state.gate.clone())
    torch.testing.assert_close(
        run(module, tokens(2), 7, copied), run(module, tokens(2), 7, state), rtol=0, atol=0
    )
