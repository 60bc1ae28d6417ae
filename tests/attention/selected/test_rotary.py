"""Rotation of the last channels, and the frequencies of YaRN."""

import math

import pytest
import torch

from attention.selected.rotary import Rotary, Yarn
from tests.attention.selected import formulas


def test_pairs_turn_as_complex_numbers() -> None:
    rotary = Rotary(6, theta=50.0)
    x = torch.randn(2, 3, 10, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 5], [7, 100, 12345]])
    out = rotary.turns(positions).rotate(x)
    for batch in range(2):
        for token in range(3):
            expected = formulas.turned(x[batch, token], int(positions[batch, token]), rotary)
            torch.testing.assert_close(out[batch, token], expected)
    assert torch.equal(out[..., :4], x[..., :4])


def test_heads_share_the_rotation_and_the_inverse_undoes_it() -> None:
    turns = Rotary(4).turns(torch.tensor([[3, 9]]))
    x = torch.randn(1, 2, 5, 8)
    out = turns.of_heads().rotate(x)
    torch.testing.assert_close(out[:, :, 2], turns.rotate(x[:, :, 2]))
    torch.testing.assert_close(turns.inverse.of_heads().rotate(out), x)


def test_scores_depend_on_the_distance_only() -> None:
    rotary = Rotary(8)
    q, k = torch.randn(2, 8, dtype=torch.float64)
    scores = []
    for shift in (0, 1000, 10**6):
        turns = rotary.turns(torch.tensor([shift + 17, shift]))
        turned_q, turned_k = turns.rotate(torch.stack([q, k]))
        scores.append(turned_q @ turned_k)
    torch.testing.assert_close(scores[1:], scores[:1] * 2, rtol=1e-8, atol=1e-8)


def test_no_channels_to_turn() -> None:
    x = torch.randn(2, 5)
    assert torch.equal(Rotary(0).turns(torch.arange(2)).rotate(x), x)


def test_yarn_slows_what_turns_rarely() -> None:
    """At theta 10,000 and 4,096 tokens: fast pairs stay, slow ones are slowed 16 times, between is mixed."""
    dims, length, factor = 64, 4096, 16.0
    angle = torch.atan2(*reversed(_first_turns(Rotary(dims, 10_000.0, Yarn(length, factor)))))
    plain = torch.atan2(*reversed(_first_turns(Rotary(dims, 10_000.0))))
    slowed = plain / angle
    times = length * plain / (2 * math.pi)
    assert torch.allclose(slowed[times > 40], torch.ones(1, dtype=torch.float64))
    assert torch.allclose(slowed[times < 0.9], torch.full((1,), factor, dtype=torch.float64))
    assert bool((slowed.diff() >= -1e-9).all())
    assert ((slowed > 1.01) & (slowed < factor - 0.01)).sum() >= 5


def _first_turns(rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
    turns = rotary.turns(torch.tensor(1))
    return turns.cos, turns.sin


@pytest.mark.parametrize(
    ("arguments", "message"), [((3,), "must be even .* got 3"), ((2, 1.0), "above 1, got")]
)
def test_what_does_not_fit(arguments: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rotary(*arguments)  # type: ignore[arg-type]
