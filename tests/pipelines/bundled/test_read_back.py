"""The read-back must be exact on drawn clips, or the score would measure the ruler."""

import subprocess
from dataclasses import replace
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pipelines.bundled.drawing import render
from pipelines.bundled.read_back import ATTRIBUTES, ReadBack, read_attributes, score
from pipelines.bundled.world import ClipSpec, all_specs, held_out_specs

Frames = NDArray[np.uint8]


def drawn(specs: tuple[ClipSpec, ...], side: int, frames: int, noise: float, seed: int = 0) -> list[Frames]:
    generator = torch.Generator().manual_seed(seed)
    clips: list[Frames] = []
    for start in range(0, len(specs), 32):
        batch = render(specs[start : start + 32], generator, height=side, width=side, num_frames=frames)
        batch = batch + 2 * noise * torch.randn(batch.shape, generator=generator)
        scaled = ((batch + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
        clips.extend(scaled.permute(0, 2, 3, 4, 1).numpy())
    return clips


@pytest.mark.parametrize(
    ("side", "frames", "noise", "every"),
    [
        (64, 5, 0.0, 1),
        (64, 5, 0.05, 3),
        (64, 9, 0.08, 5),
        (96, 9, 0.08, 8),
        (128, 9, 0.0, 16),
        (128, 33, 0.08, 80),
    ],
)
def test_exact_on_drawn_clips(side: int, frames: int, noise: float, every: int) -> None:
    specs = all_specs()[side % every :: every]
    result = score(specs, drawn(specs, side, frames, noise))
    assert result.all_five == 1.0, result


@pytest.mark.parametrize("side", [64, 128])
def test_exact_after_h264(side: int, tmp_path: Path) -> None:
    specs = held_out_specs()[: 2560 // side]
    clips = drawn(specs, side, 9, 0.0)
    decoded = through_h264(np.concatenate(clips), tmp_path / "all.mp4")
    result = score(specs, np.split(decoded, len(specs)))
    assert result.all_five == 1.0, result


def through_h264(frames: Frames, path: Path) -> Frames:
    """Frames [T, H, W, 3] written as yuv420p H.264 to ``path`` and decoded again."""
    height, width = frames.shape[1:3]
    raw = ["-f", "rawvideo", "-pix_fmt", "rgb24"]
    ffmpeg = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error"]
    encode = [*ffmpeg, *raw, "-s", f"{width}x{height}", "-r", "16", "-i", "-"]
    subprocess.run(
        [*encode, "-c:v", "libx264", "-pix_fmt", "yuv420p", str(path)], input=frames.tobytes(), check=True
    )
    decoded = subprocess.run([*ffmpeg, "-i", str(path), *raw, "-"], capture_output=True, check=True).stdout
    return np.frombuffer(decoded, np.uint8).reshape(frames.shape)


@pytest.mark.parametrize("radius", [1, 2])
def test_exact_on_blurred_clips(radius: int) -> None:
    """A generated clip's edges are a few pixels wide."""
    specs = held_out_specs()[:32]
    clips = [blurred(clip, radius) for clip in drawn(specs, 96, 5, 0.02)]
    result = score(specs, clips)
    assert result.all_five == 1.0, result


def blurred(clip: Frames, radius: int) -> NDArray[np.float32]:
    """Separable box blur of (2 radius + 1) pixels, twice: as float in [0, 1]."""
    blurry: NDArray[np.float32] = clip.astype(np.float32) / np.float32(255)
    for axis in (1, 2, 1, 2):
        shifted = [np.roll(blurry, step, axis=axis) for step in range(-radius, radius + 1)]
        blurry = np.mean(shifted, axis=0, dtype=np.float32)
    return blurry


def test_one_colour_shows_nothing() -> None:
    seen = read_attributes(np.full((5, 64, 64, 3), 128, np.uint8))
    assert seen == ReadBack(None, None, None, None, "grey", (0.0, 0.0), 0.0)


def test_standing_object_has_no_direction() -> None:
    clip = drawn(held_out_specs()[:1], 64, 9, 0.0)[0]
    standing = read_attributes(np.repeat(clip[4:5], 9, axis=0))
    moving = read_attributes(clip)
    assert (standing.direction, standing.speed) == (None, None)
    assert (standing.color, standing.shape) == (moving.color, moving.shape)


def test_reversed_clip_moves_the_other_way() -> None:
    spec = ClipSpec("red", "circle", "left", "quickly", "white")
    clip = drawn((spec,), 64, 9, 0.0)[0]
    forth, back = read_attributes(clip), read_attributes(clip[::-1])
    assert (forth.direction, back.direction) == ("left", "right")
    assert forth.displacement == pytest.approx((-0.46, 0.0), abs=0.02)


def test_vanished_object_is_noticed() -> None:
    clip = drawn(held_out_specs()[:1], 64, 9, 0.0)[0].copy()
    clip[5] = clip[5, 0, 0]
    seen = read_attributes(clip)
    assert (seen.shape, seen.direction, seen.speed) == (None, None, None)
    assert seen.color == held_out_specs()[0].color


def test_float_and_uint8_agree() -> None:
    clip = drawn(held_out_specs()[:1], 64, 5, 0.0)[0]
    assert read_attributes(clip.astype(np.float32) / 255) == read_attributes(clip)


@pytest.mark.parametrize("attribute", ATTRIBUTES)
def test_score_counts_each_attribute(attribute: str) -> None:
    """Asking for another value of one attribute costs that attribute and all five, nothing else."""
    specs = held_out_specs()[:4]
    clips = drawn(specs, 64, 5, 0.0)
    other = next(s for s in all_specs() if getattr(s, attribute) != getattr(specs[0], attribute))
    asked = (replace(specs[0], **{attribute: getattr(other, attribute)}), *specs[1:])
    result = score(asked, clips)
    assert result.all_five == 0.75
    for name in ATTRIBUTES:
        assert getattr(result, name) == (0.75 if name == attribute else 1.0)


def test_wrong_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(64, 64, 3\)"):
        read_attributes(np.zeros((64, 64, 3), np.uint8))
    with pytest.raises(ValueError, match="0 clips for 1 specs"):
        score(held_out_specs()[:1], [])
