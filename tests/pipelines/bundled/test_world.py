"""The world's tables, its split, its drawings and its words."""

import random

import pytest
import torch

from pipelines.bundled import prompts
from pipelines.bundled.drawing import REACH, draw, render, sample_motion
from pipelines.bundled.world import (
    BACKGROUNDS,
    COLORS,
    SPEEDS,
    ClipSpec,
    all_specs,
    held_out_specs,
    is_held_out,
    trained_specs,
)


def test_split_is_about_a_quarter_and_covers_every_value() -> None:
    assert len(all_specs()) == 8 * 4 * 4 * 2 * 5
    assert set(trained_specs()).isdisjoint(held_out_specs())
    assert set(trained_specs()) | set(held_out_specs()) == set(all_specs())
    assert 200 <= len(held_out_specs()) <= 0.3 * len(all_specs())
    for name in ClipSpec.__dataclass_fields__:
        values = {getattr(spec, name) for spec in all_specs()}
        assert {getattr(spec, name) for spec in trained_specs()} == values
        assert {getattr(spec, name) for spec in held_out_specs()[:200]} == values


def test_split_never_changes() -> None:
    """Another split would make old weights look better than they are: it has seen what is then held out."""
    assert len(held_out_specs()) == 315
    assert is_held_out(held_out_specs()[0])
    assert held_out_specs()[0] == ClipSpec("yellow", "square", "up", "slowly", "black")


def test_colors_are_far_from_each_other_and_from_backgrounds() -> None:
    table = torch.tensor([*COLORS.values(), *BACKGROUNDS.values()])
    distances = torch.cdist(table, table) + 10 * torch.eye(len(table))
    assert distances.min() > 0.3


@pytest.mark.parametrize(("height", "width"), [(64, 64), (96, 64), (64, 112)])
def test_clips_have_the_asked_shape_and_stay_inside(height: int, width: int) -> None:
    specs = all_specs()[::40]
    clips = render(specs, torch.Generator().manual_seed(0), height=height, width=width, num_frames=5)
    assert clips.shape == (len(specs), 3, 5, height, width)
    assert clips.dtype == torch.float32
    assert clips.abs().max() <= 1
    for edge in (clips[..., 0, :], clips[..., -1, :], clips[..., 0], clips[..., -1]):
        assert torch.allclose(edge, edge[..., :1, :1], atol=1e-6)


def test_same_generator_draws_same_clips() -> None:
    specs = all_specs()[:4]
    first, again, other = (
        render(specs, torch.Generator().manual_seed(seed), height=64, width=64, num_frames=3)
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_window_is_a_cut_out_of_the_whole_clip() -> None:
    specs = all_specs()[::100]
    motion = sample_motion(specs, torch.Generator().manual_seed(0))
    whole = draw(specs, motion, height=64, width=64, num_frames=3, short_side=64)
    origin = torch.tensor([[8 / 64, 16 / 64]]).expand(len(specs), 2)
    window = draw(specs, motion, height=32, width=40, num_frames=3, short_side=64, origin=origin)
    assert torch.allclose(window, whole[..., 16:48, 8:48], atol=1e-4)


def test_motion_leaves_room_for_the_whole_path() -> None:
    specs = [spec for spec in all_specs() if spec.speed == "quickly" and spec.direction == "left"]
    motion = sample_motion(specs, torch.Generator().manual_seed(3))
    reach = motion.radius * REACH
    assert (motion.centre[:, 0] - SPEEDS["quickly"] / 2 - reach).min() > -1e-6
    assert (motion.centre[:, 0] + SPEEDS["quickly"] / 2 + reach).max() < 1 + 1e-6


def test_canonical_prompt() -> None:
    spec = ClipSpec("red", "circle", "left", "quickly", "white")
    assert prompts.prompt(spec) == "a red circle moving left quickly on a white background"


def test_prompts_are_understood() -> None:
    rng = random.Random(0)
    for spec in all_specs():
        assert prompts.spec_from_prompt(prompts.prompt(spec)) == spec
        # A sentence that leaves an attribute out says no complete clip, and never a wrong one.
        assert prompts.spec_from_prompt(prompts.varied_prompt(spec, rng)) in (spec, None)


def test_varied_prompts_vary_and_sometimes_leave_something_out() -> None:
    rng = random.Random(0)
    spec = ClipSpec("purple", "ring", "up", "slowly", "grey")
    said = [prompts.varied_prompt(spec, rng) for _ in range(400)]
    assert len(set(said)) > 100
    understood = [prompts.spec_from_prompt(text) for text in said]
    assert 0.75 < understood.count(spec) / len(said) < 0.95


@pytest.mark.parametrize(
    "text", ["", "a red circle", "a red blue circle moving left quickly on a white background"]
)
def test_incomplete_or_contradictory_prompts_ask_for_no_clip(text: str) -> None:
    assert prompts.spec_from_prompt(text) is None


def test_every_word_of_the_grammar_is_in_the_vocabulary() -> None:
    rng = random.Random(0)
    words = {
        word
        for spec in all_specs()
        for text in (prompts.prompt(spec), prompts.varied_prompt(spec, rng))
        for word in text.replace(",", " ").replace(":", " ").split()
    }
    assert words <= set(prompts.vocabulary())
