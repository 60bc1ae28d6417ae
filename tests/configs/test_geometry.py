import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.geometry import GeometryError, VideoGeometry

WAN = VideoGeometry()
WAN_5B = VideoGeometry(vae_spatial=16, vae_temporal=4, patch=(1, 2, 2))


@pytest.mark.parametrize(
    ("pixels", "near"), [(0, "16"), (15, "16"), (17, "16 or 32"), (470, "464 or 480"), (481, "480 or 496")]
)
def test_sides_that_cannot_be_made_name_the_nearest(pixels: int, near: str) -> None:
    with pytest.raises(
        GeometryError, match=f"width {pixels} is not a multiple of 16; nearest valid: {near}$"
    ):
        WAN.check_side("width", pixels)


@pytest.mark.parametrize(("frames", "near"), [(0, "1"), (2, "1 or 5"), (80, "77 or 81"), (84, "81 or 85")])
def test_frame_counts_that_cannot_be_made_name_the_nearest(frames: int, near: str) -> None:
    with pytest.raises(GeometryError, match=rf"num_frames {frames} is not of the form 4k\+1; .*: {near}$"):
        WAN.check_frames(frames)


def test_valid_sizes_pass() -> None:
    for side in (16, 480, 832):
        WAN.check_side("width", side)
    for frames in (1, 5, 81):
        WAN.check_frames(frames)
    assert WAN_5B.side_multiple == 32


@given(st.floats(0.01, 100), st.integers(1, 60))
def test_seconds_become_the_nearest_valid_frame_count(seconds: float, fps: int) -> None:
    frames = WAN.frames_for_seconds(seconds, fps)
    WAN.check_frames(frames)
    distance = abs(frames - seconds * fps)
    assert all(
        distance <= abs(other - seconds * fps) + 1e-9 for other in (frames - 4, frames + 4) if other >= 1
    )


@pytest.mark.parametrize(
    ("geometry", "size", "grid"),
    [
        (WAN, (832, 480, 81), (21, 30, 52)),
        (WAN, (1280, 720, 81), (21, 45, 80)),
        (WAN_5B, (1280, 704, 121), (31, 22, 40)),
    ],
)
def test_token_grids_of_the_published_models(
    geometry: VideoGeometry, size: tuple[int, int, int], grid: tuple[int, int, int]
) -> None:
    assert geometry.token_grid(*size) == grid
