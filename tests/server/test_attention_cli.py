from itertools import product
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from attention.pattern import density
from server.cli import app

runner = CliRunner()


def shown(*arguments: str) -> str:
    result = runner.invoke(app, ["attention", "show", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def frames_of(output: str) -> list[str]:
    """Characters of each frame, row after row."""
    return ["".join(part.splitlines()[1:]) for part in output.split("\nframe ")[1:]]


def test_raster_blocks_are_drawn_token_by_token() -> None:
    output = shown(
        "--grid",
        "2x3x4",
        "--token",
        "0,1,1",
        "--block-size",
        "6",
        "--anchor-stride",
        "5",
        "--anchor-offset",
        "2",
    )
    drawn = "".join(frames_of(output))
    for token, character in enumerate(drawn):
        expected = "@" if token == 5 else "o" if token % 5 == 2 else "#" if token // 6 == 0 else "."
        assert character == expected, token
    assert f"sees {len(drawn) - drawn.count('.')} of them" in output
    assert f"2x3x4 = 24 tokens, density {density(24, 6, 5, 2):.4f}" in output


def test_windows_and_tiles_are_drawn() -> None:
    window = frames_of(
        shown("--grid", "5x2x2", "--attention-backend", "window", "--window", "1", "--global-frames", "1")
    )
    assert window == ["oooo", "####", "###@", "####", "...."]
    tile = frames_of(
        shown("--grid", "4x2x4", "--token-order", "tile", "--tile-thw", "2x2x2", "--anchor-stride", "1024")
    )
    # The middle token's box: frames 2 and 3, columns 2 and 3. One in 1024 tokens is an anchor.
    assert [frame.replace("o", ".") for frame in tile[:2]] == ["........"] * 2
    assert [frame.replace("o", "#").replace("@", "#") for frame in tile[2:]] == ["..##..##"] * 2


def test_boxes_show_what_is_seen_whatever_they_choose() -> None:
    flags = [
        "--grid",
        "2x4x4",
        "--attention-backend",
        "block_topk",
        "--tile-thw",
        "1x2x2",
        "--token",
        "0,0,0",
    ]
    output = shown(*flags, "--top-k", "5")
    assert [frame.replace("@", "#") for frame in frames_of(output)] == [
        "########" + "##??" * 2,
        "##??" * 2 + "?" * 8,
    ]
    assert "top_k 5: each of 8 boxes keeps 5 to 5" in output
    assert f"density {5 / 8:.4f}" in output
    assert "sees 16 of them (0.5000) whatever the content" in output
    runs = shown(
        "--grid", "1x2x4", "--attention-backend", "block_topk", "--block-size", "2", "--anchor-stride", "4"
    )  # fmt: skip
    assert frames_of(runs) == ["o???o#@#"]


def test_a_picture_shows_the_same(tmp_path: Path) -> None:
    flags = ["--grid", "3x4x5", "--token-order", "tile", "--tile-thw", "2x2x2", "--anchor-stride", "7"]
    drawn = "".join(frames_of(shown(*flags)))
    file = tmp_path / "seen.png"
    assert "density" in shown(*flags, "--png", str(file))
    with Image.open(file) as picture:
        colours = {picture.getpixel((x, y)) for x, y in product(range(picture.width), range(picture.height))}
    assert len(colours) == 1 + len(set(drawn))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--grid", "3x4"], "three whole numbers"),
        (["--grid", "3x4x0"], "three sides of at least 1"),
        (["--token", "1,2"], "must be frame,row,column"),
        (["--token", "21,0,0"], "token must lie in a clip of 21 x 30 x 52"),
        (["--anchor-stride", "0"], "anchor_stride"),
        (["--token-order", "tile", "--block-size", "5"], "no effect with token_order=tile"),
        (["--attention-backend", "block_topk", "--top-k", "1.5"], "Invalid value: top_k=1.5"),
        (["--attention-backend", "dense"], "nothing to draw"),
    ],
)
def test_wrong_values_are_named(flags: list[str], message: str) -> None:
    result = runner.invoke(app, ["attention", "show", *flags])
    assert result.exit_code == 2
    flat = " ".join(result.output.replace("│", " ").split())
    assert message in flat
