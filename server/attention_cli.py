"""``reelwright attention``: look at an attention setting before any model runs with it.

Knows: how a setting reads and what it draws. Does not know: models; a clip is a grid of tokens here.
"""

from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from attention.block_topk.boxes import BoxPattern
from attention.pattern import AnchorLocalPattern
from attention.seeing import ChoosingBoxes, Position, Rule, Sight, View, view
from attention.tiles import Grid, TilePattern
from attention.window_sink.window import Window
from configs.attention import AttentionConfig, AttentionOverrides

attention_app = typer.Typer(no_args_is_help=True, help="Look at attention settings.")

_PIXELS = 6  # of a token's side
_GAP = 6  # pixels between two frames
_COLOURS = {
    Sight.UNSEEN: (235, 235, 235),
    Sight.CHOSEN: (200, 220, 240),
    Sight.LOCAL: (70, 120, 200),
    Sight.ANCHOR: (240, 150, 40),
    Sight.ITSELF: (200, 30, 30),
}
_BACKGROUND = (255, 255, 255)


@attention_app.command("show")
def show_command(
    grid: Annotated[
        str, typer.Option(help="Tokens of the clip: latent frames x rows x columns.")
    ] = "21x30x52",
    token: Annotated[
        str | None, typer.Option(help="frame,row,column of the token that looks. Default: the middle one.")
    ] = None,
    attention_backend: Annotated[str | None, typer.Option(help="anchor_local, block_topk or window.")] = None,
    token_order: Annotated[str | None, typer.Option(help="raster or tile.")] = None,
    block_size: Annotated[str | None, typer.Option(help="Of a block or box of the raster, or auto.")] = None,
    block_unit: Annotated[str | None, typer.Option(help="What it counts: tokens or frames.")] = None,
    tile_thw: Annotated[str | None, typer.Option(help="time x height x width of a box, or auto.")] = None,
    anchor_stride: Annotated[str | None, typer.Option(help="Or auto, or none.")] = None,
    anchor_offset: Annotated[str | None, typer.Option(help="Which token is the first anchor.")] = None,
    window: Annotated[str | None, typer.Option(help="Units to either side, or auto.")] = None,
    window_unit: Annotated[str | None, typer.Option(help="frames or tokens.")] = None,
    global_frames: Annotated[str | None, typer.Option(help="First frames that all see.")] = None,
    top_k: Annotated[
        str | None, typer.Option(help="Boxes that a box keeps: below 1 a share of all, else a count.")
    ] = None,
    png: Annotated[
        Path | None, typer.Option(help="Draw into this file instead of into the terminal.")
    ] = None,
) -> None:
    """Draw which tokens one token sees, and print the density."""
    said = {
        "backend": attention_backend,
        "token_order": token_order,
        "block_size": block_size,
        "block_unit": block_unit,
        "tile_thw": None if tile_thw is None else _sides("--tile-thw", tile_thw),
        "anchor_stride": anchor_stride,
        "anchor_offset": anchor_offset,
        "window": window,
        "window_unit": window_unit,
        "global_frames": global_frames,
        "top_k": top_k,
    }
    sides: Any = _sides("--grid", grid)
    if sides == "auto" or min(sides) < 1:
        raise typer.BadParameter(
            f"must be three sides of at least 1, such as 21x30x52, got {grid}", param_hint="--grid"
        )
    try:
        setting = AttentionOverrides.model_validate(said).over(AttentionConfig()).resolved(sides)
        looking = _position(token) if token is not None else _middle(sides)
        seen = view(_rule(setting, sides), sides, looking)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = "".join(f"{part}: " for part in first["loc"])
        raise typer.BadParameter(place + first["msg"].removeprefix("Value error, ")) from error
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(_summary(setting, looking, seen))
    if png is None:
        typer.echo(_drawn(seen))
    else:
        _draw(seen, png)


def _sides(option: str, text: str) -> Any:
    if text == "auto":
        return text
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        raise typer.BadParameter(f"must be three whole numbers, such as 2x8x8, got {text}", param_hint=option)
    return tuple(int(part) for part in parts)


def _position(text: str) -> Position:
    parts = text.split(",")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        raise typer.BadParameter(f"must be frame,row,column, got {text}", param_hint="--token")
    frame, row, column = (int(part) for part in parts)
    return frame, row, column


def _middle(grid: Grid) -> Position:
    frame, row, column = (side // 2 for side in grid)
    return frame, row, column


def _rule(setting: AttentionConfig, grid: Grid) -> Rule:
    """What a setting without auto says about so many tokens."""
    if setting.backend == "window" and setting.window != "auto":
        frame = grid[1] * grid[2]
        return Window.of_clip((setting.window,) * 2, setting.window_unit, setting.global_frames, frame)
    if setting.backend == "block_topk":
        return ChoosingBoxes(BoxPattern(*setting.boxes), setting.top_k)
    if setting.backend == "anchor_local" and not isinstance(setting.anchor_stride, str):
        if setting.token_order == "tile" and setting.tile_thw != "auto":
            return TilePattern(setting.tile_thw, setting.anchor_stride, setting.anchor_offset)
        if setting.token_order == "raster" and setting.block_size != "auto":
            return AnchorLocalPattern(setting.block_size, setting.anchor_stride, setting.anchor_offset)
    raise ValueError("dense attention sees everything; there is nothing to draw")


def _summary(setting: AttentionConfig, token: Position, seen: View) -> str:
    if setting.backend == "window":
        what = f"window {setting.window} {setting.window_unit}, global_frames {setting.global_frames}"
    elif setting.backend == "block_topk":
        what = _boxes_summary(setting, seen.grid)
    else:
        block = f"block_size {setting.block_size}"
        if setting.token_order == "tile":
            block = "tile_thw " + "x".join(map(str, setting.tile_thw))
        what = f"anchor_local {setting.token_order}, {block}, anchor_stride {setting.anchor_stride}"
        what += f", anchor_offset {setting.anchor_offset}"
    tokens = len(seen.sights)
    always = " whatever the content" if setting.backend == "block_topk" else ""
    return (
        f"{what}\n{'x'.join(map(str, seen.grid))} = {tokens} tokens, density {seen.density:.4f}\n"
        f"token {','.join(map(str, token))} sees {seen.seen} of them ({seen.seen / tokens:.4f}){always}"
    )


def _boxes_summary(setting: AttentionConfig, grid: Grid) -> str:
    pattern = BoxPattern(*setting.boxes)
    boxes = pattern.boxes(grid)
    kept = boxes.kept(setting.top_k)
    what = f"block_size {setting.block_size}"
    if setting.tile_thw != "auto":
        what = "tile_thw " + "x".join(map(str, setting.tile_thw))
    what += f", anchor_stride {setting.anchor_stride}"
    if setting.anchor_stride != "none":
        what += f", anchor_offset {setting.anchor_offset}"
    each = f"{min(kept)} to {max(kept)}" if kept else "0"
    return f"block_topk, {what}, top_k {setting.top_k:g}: each of {len(kept)} boxes keeps {each}"


def _drawn(seen: View) -> str:
    """One block of characters a frame."""
    frames, rows, columns = seen.grid
    legend = f"{Sight.ITSELF.value} itself  {Sight.LOCAL.value} local  {Sight.ANCHOR.value} anchor  . unseen"
    if Sight.CHOSEN in seen.sights:
        legend += f"  {Sight.CHOSEN.value} seen if its box is chosen"
    lines = [legend]
    for frame in range(frames):
        lines += ["", f"frame {frame}"]
        for row in range(rows):
            begin = (frame * rows + row) * columns
            lines.append("".join(sight.value for sight in seen.sights[begin : begin + columns]))
    return "\n".join(lines)


def _draw(seen: View, path: Path) -> None:
    """Frames side by side, some rows of them."""
    from PIL import Image

    frames, rows, columns = seen.grid
    across = max(1, round((frames * rows / columns) ** 0.5))
    down = -(-frames // across)
    width, height = columns * _PIXELS + _GAP, rows * _PIXELS + _GAP
    picture = Image.new("RGB", (across * width + _GAP, down * height + _GAP), _BACKGROUND)
    for frame in range(frames):
        begin = frame * rows * columns
        tokens = Image.new("RGB", (columns, rows))
        tokens.putdata([_COLOURS[sight] for sight in seen.sights[begin : begin + rows * columns]])
        place = (_GAP + frame % across * width, _GAP + frame // across * height)
        picture.paste(tokens.resize((columns * _PIXELS, rows * _PIXELS), Image.Resampling.NEAREST), place)
    picture.save(path, format="PNG")
