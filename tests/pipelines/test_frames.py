"""Guards on frames, and rounding to bytes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs.job import JobFailedError
from pipelines.frames import Frames, Leaving, require_clip, require_finite


def _noise(count: int = 3, height: int = 4, width: int = 6) -> Frames:
    return np.random.default_rng(0).integers(0, 256, (count, height, width, 3), dtype=np.uint8)


@given(st.integers(0, 255), st.floats(-0.49, 0.49))
def test_values_are_rounded_to_nearest(level: int, off: float) -> None:
    value = min(max((level + off) / 255, 0.0), 1.0)
    assert Leaving(torch.full((1, 3, 1, 1), value)).frames().flatten().tolist() == [level] * 3


def test_axes_and_channels_keep_their_place() -> None:
    pictures = torch.zeros(2, 3, 4, 6)
    pictures[1, 2, 3, 5] = 1.0
    frames = Leaving(pictures).frames()
    assert frames.shape == (2, 4, 6, 3)
    assert np.argwhere(frames).tolist() == [[1, 3, 5, 2]]


def test_bfloat16_pictures_reach_every_end() -> None:
    pictures = torch.tensor([0.0, 1.0], dtype=torch.bfloat16).reshape(2, 1, 1, 1).expand(2, 3, 1, 1)
    assert Leaving(pictures).frames()[:, 0, 0, 0].tolist() == [0, 255]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_value_that_is_not_finite_is_found(value: float) -> None:
    tensor = torch.zeros(2, 5)
    require_finite(tensor, "latents")
    tensor[1, 3] = value
    with pytest.raises(JobFailedError) as caught:
        require_finite(tensor, "latents")
    assert caught.value.code == "bad_output"
    assert caught.value.message == "latents: 1 of 10 values are NaN or infinite"
    pictures = torch.zeros(2, 3, 4, 6)
    pictures[1, 2, 3, 5] = value
    leaving = Leaving(pictures, hint="; see there")
    with pytest.raises(JobFailedError) as caught:
        leaving.frames()
    assert caught.value.code == "bad_output"
    assert caught.value.message == "decoded pictures: 1 of 144 values are NaN or infinite; see there"


def test_a_clip_as_asked_passes() -> None:
    require_clip(_noise(), 3, 4, 6)


@pytest.mark.parametrize("asked", [(4, 4, 6), (3, 6, 4), (3, 4, 8)])
def test_wrong_count_or_size(asked: tuple[int, int, int]) -> None:
    with pytest.raises(JobFailedError) as caught:
        require_clip(_noise(), *asked)
    assert caught.value.code == "bad_output"
    assert "the model made 3 frames of 6x4" in caught.value.message
    assert f"asked were {asked[0]} of {asked[2]}x{asked[1]}" in caught.value.message


def test_flat_frames_are_refused_even_if_their_colours_differ() -> None:
    frames = np.zeros((3, 4, 6, 3), np.uint8)
    frames[2] = (9, 8, 7)
    with pytest.raises(JobFailedError) as caught:
        require_clip(frames, 3, 4, 6)
    assert caught.value.code == "bad_output"
    assert caught.value.message == (
        "every one of the 3 frames is a single flat colour (RGB (0, 0, 0), (9, 8, 7))"
    )


def test_one_pixel_off_by_one_is_no_flat_clip() -> None:
    frames = np.full((3, 4, 6, 3), 127, np.uint8)
    frames[1, 2, 3, 1] += 1
    require_clip(frames, 3, 4, 6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_goes_on_while_pictures_leave() -> None:
    pictures = torch.rand(4, 3, 64, 96, generator=torch.Generator().manual_seed(0))
    expected = Leaving(pictures).frames()
    on_gpu = pictures.cuda()
    leaving = Leaving(on_gpu)
    del on_gpu
    torch.cuda._sleep(2**31)  # a second or so of what came later
    found = leaving.frames()
    assert not torch.cuda.current_stream().query()
    assert (found == expected).all()
