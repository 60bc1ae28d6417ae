"""Attention settings: what a server or a request may ask for, and what that resolves to for one clip."""

import math
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

AttentionBackend = Literal["dense", "anchor_local", "block_topk", "window"]
TokenOrder = Literal["raster", "tile"]
AttentionPrecision = Literal["full", "fp8"]
WindowUnit = Literal["frames", "tokens"]
TokenCount = Annotated[int, Field(ge=1, le=2**31 - 1)]
CountFromZero = Annotated[int, Field(ge=0, le=2**31 - 1)]
TileSides = tuple[TokenCount, TokenCount, TokenCount]
TopK = Annotated[float, Field(gt=0, le=2**31 - 1, allow_inf_nan=False)]
AnchorStride = TokenCount | Literal["auto", "none"]
DenseSteps = Annotated[float, Field(ge=0, allow_inf_nan=False)]

# A block of two latent frames and an anchor in every 16 tokens is careful: about a fifth of the pairs of a
# clip of 21 latent frames. See docs/attention.md for what other values do to speed and pictures.
AUTO_BLOCK_FRAMES = 2
AUTO_ANCHOR_STRIDE = 16
# Tiles spread anchors over all three axes, whatever the stride; finding how takes too long beyond this one.
MAX_TILE_STRIDE = 1024
# A window of an eighth of the clip to either side, and the first frame: a quarter of the pairs of a clip of
# 21 latent frames.
AUTO_WINDOW_SHARE = 8
# A box has a 64th of the tokens at most, and 512 at most unless there would be more than 1,024 boxes: with
# fewer boxes those that touch are more than the fifth that is kept.
AUTO_BOX_SHARE = 64
AUTO_BOXES = 1024
AUTO_BOX_TOKENS = 512
# Scores of all pairs of boxes are made.
MAX_BOXES = 2048
TOP_K = 0.2

# Settings that not every sparse backend has.
BACKEND_SETTINGS: dict[AttentionBackend, tuple[str, ...]] = {
    "anchor_local": (
        "token_order",
        "block_size",
        "block_unit",
        "tile_thw",
        "anchor_stride",
        "anchor_offset",
        "anchor_rotation",
        "precision",
    ),
    "block_topk": ("block_size", "tile_thw", "anchor_stride", "anchor_offset", "top_k", "pooled_rest"),
    "window": ("window", "window_unit", "global_frames"),
}
# The same for the two orders of anchor_local.
ORDER_SETTINGS: dict[TokenOrder, tuple[str, ...]] = {
    "raster": ("block_size", "block_unit"),
    "tile": ("tile_thw",),
}


class AttentionConfig(BaseModel):
    """A complete attention setting. ``auto`` values are resolved against the clip's token grid."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: AttentionBackend = "anchor_local"
    token_order: TokenOrder = Field(
        default="raster",
        description="Of anchor_local: blocks of tokens in raster order, or tiles (boxes of the clip).",
    )
    block_size: TokenCount | Literal["auto"] = "auto"
    block_unit: WindowUnit = Field(
        default="tokens", description="What block_size counts: tokens, or latent frames."
    )
    tile_thw: TileSides | Literal["auto"] = Field(
        default="auto",
        description="Of token_order tile and of block_topk: time, height and width of a box, in tokens.",
    )
    anchor_stride: AnchorStride = Field(
        default="auto", description="One in so many tokens is an anchor; none (of block_topk only): none is."
    )
    anchor_offset: CountFromZero = 0
    anchor_rotation: bool = Field(
        default=False, description="The offset grows by one a step, so that no token is an anchor for ever."
    )
    precision: AttentionPrecision = Field(
        default="full",
        description="Of sparse calls of anchor_local: full, the model's format, or fp8 (a GPU that has it).",
    )
    window: CountFromZero | Literal["auto"] = Field(
        default="auto", description="Of window: units that a token sees to either side of its own."
    )
    window_unit: WindowUnit = Field(
        default="frames", description="What the window counts: latent frames, or tokens."
    )
    global_frames: CountFromZero = Field(
        default=1, description="Of window: latent frames at the start that every token sees."
    )
    top_k: TopK = Field(
        default=TOP_K,
        description="Of block_topk: boxes that a box of queries keeps; below 1 a share of all, else a count.",
    )
    pooled_rest: bool = Field(
        default=False, description="Of block_topk: each box that is not kept takes part as one mean key."
    )
    dense_steps: DenseSteps = Field(
        default=0.2,
        description="How many early denoise steps run dense: below 1 a fraction of all steps, else a count.",
    )
    dense_layers: tuple[CountFromZero, ...] = ()
    min_tokens: CountFromZero = Field(
        default=1024, description="Clips with fewer tokens than this run dense; the job says so."
    )

    @model_validator(mode="after")
    def _whole_counts(self) -> Self:
        if self.dense_steps >= 1 and self.dense_steps != int(self.dense_steps):
            raise ValueError(
                f"dense_steps={self.dense_steps} is neither a fraction below 1 nor a whole number of steps"
            )
        if self.top_k >= 1 and self.top_k != int(self.top_k):
            raise ValueError(
                f"top_k={self.top_k} is neither a share of the boxes below 1 nor a whole number of them"
            )
        if self.backend == "anchor_local" and self.anchor_stride == "none":
            raise ValueError("anchor_stride=none is for backend block_topk; anchor_local needs anchors")
        if self.backend == "block_topk":
            self._check_boxes()
        if not isinstance(self.anchor_stride, str) and self.anchor_offset >= self.anchor_stride:
            raise ValueError(
                f"anchor_offset={self.anchor_offset} must be below anchor_stride={self.anchor_stride}"
            )
        if (
            self.token_order == "tile"
            and not isinstance(self.anchor_stride, str)
            and self.anchor_stride > MAX_TILE_STRIDE
        ):
            raise ValueError(
                f"anchor_stride={self.anchor_stride} must be at most {MAX_TILE_STRIDE} with token_order=tile"
            )
        return self

    def _check_boxes(self) -> None:
        if self.block_size != "auto" and self.tile_thw != "auto":
            raise ValueError(
                f"block_topk has boxes of block_size={self.block_size} tokens in raster order or of "
                f"tile_thw={self.tile_thw}; give one of the two"
            )
        if isinstance(self.anchor_stride, str):
            if self.anchor_offset:
                raise ValueError(f"anchor_offset={self.anchor_offset} has no effect without an anchor_stride")
        elif self.block_size == "auto" and self.anchor_stride > MAX_TILE_STRIDE:
            raise ValueError(
                f"anchor_stride={self.anchor_stride} must be at most {MAX_TILE_STRIDE} with tile_thw"
            )

    def dense_step_count(self, total_steps: int) -> int:
        """Number of leading steps that run dense; a fraction is rounded up."""
        if self.dense_steps < 1:
            return math.ceil(self.dense_steps * total_steps)
        return min(int(self.dense_steps), total_steps)

    def resolved(self, grid: tuple[int, int, int]) -> "AttentionConfig":
        """Replace ``auto`` by the values for ``grid``, (latent frames, rows, columns) of tokens."""
        frames, rows, columns = grid
        frame = rows * columns
        found: dict[str, object] = {}
        if self.backend == "anchor_local":
            found |= self._tiles(grid) if self.token_order == "tile" else self._blocks(frame)
        if self.backend == "block_topk":
            if self.block_size == "auto" and self.tile_thw == "auto":
                found["tile_thw"] = auto_tile(grid, _box_tokens(math.prod(grid)))
            found["anchor_stride"] = "none" if self.anchor_stride == "auto" else self.anchor_stride
        if self.backend == "window" and self.window == "auto":
            window = max(1, frames // AUTO_WINDOW_SHARE)
            found["window"] = window if self.window_unit == "frames" else window * frame
        # model_copy does not validate, and the offset must be checked against the stride that will run.
        config = AttentionConfig.model_validate(self.model_dump() | found)
        if config.backend == "block_topk":
            config._check_box_count(grid)
        return config

    def _check_box_count(self, grid: tuple[int, int, int]) -> None:
        tile, size, *_ = self.boxes
        boxes = -(-math.prod(grid) // (size or 1))
        if tile is not None:
            boxes = math.prod(-(-side // of_box) for side, of_box in zip(grid, tile, strict=True))
        if boxes > MAX_BOXES:
            raise ValueError(
                f"{f'tile_thw={tile}' if tile else f'block_size={size}'} cuts a clip of "
                f"{' x '.join(map(str, grid))} tokens into {boxes} boxes; at most {MAX_BOXES} are possible, "
                "so make it larger"
            )

    @property
    def boxes(self) -> tuple[TileSides | None, int | None, int | None, int]:
        """tile_thw, block_size, anchor_stride and anchor_offset of resolved block_topk; None: not said.

        Raises:
            ValueError: a value is still auto.
        """
        tile = None if self.tile_thw == "auto" else self.tile_thw
        size = None if self.block_size == "auto" else self.block_size
        stride = self.anchor_stride
        if stride == "auto" or (tile is None and size is None):
            raise ValueError("boxes are known when the setting is resolved for a clip")
        return tile, size, None if stride == "none" else stride, self.anchor_offset

    def _blocks(self, frame: int) -> dict[str, object]:
        """Block size in tokens and stride, for frames of so many tokens."""
        size = AUTO_BLOCK_FRAMES * frame if self.block_size == "auto" else self.block_size
        if self.block_unit == "frames" and self.block_size != "auto":
            size *= frame
        stride = _spread_stride(frame) if self.anchor_stride == "auto" else self.anchor_stride
        return {"block_size": size, "block_unit": "tokens", "anchor_stride": stride}

    def _tiles(self, grid: tuple[int, int, int]) -> dict[str, object]:
        """Sides of a box and stride."""
        most = AUTO_BLOCK_FRAMES * grid[1] * grid[2]
        tile = auto_tile(grid, most) if self.tile_thw == "auto" else self.tile_thw
        stride = AUTO_ANCHOR_STRIDE if self.anchor_stride == "auto" else self.anchor_stride
        return {"tile_thw": tile, "anchor_stride": stride}


def auto_tile(grid: tuple[int, int, int], most_tokens: int) -> tuple[int, int, int]:
    """Sides of a box of at most so many tokens (at least one): the grid cut evenly, longest side first."""
    cuts = [1, 1, 1]
    while True:
        frames, rows, columns = (-(-side // cut) for side, cut in zip(grid, cuts, strict=True))
        if frames * rows * columns <= max(most_tokens, 1):
            return frames, rows, columns
        tile = [frames, rows, columns]
        cuts[tile.index(max(tile))] += 1


def _box_tokens(tokens: int) -> int:
    """Most tokens of a box of a clip of so many."""
    return max(min(AUTO_BOX_TOKENS, tokens // AUTO_BOX_SHARE), -(-tokens // AUTO_BOXES))


def _spread_stride(tokens_per_frame: int) -> int:
    """Smallest stride from AUTO_ANCHOR_STRIDE that shares no factor with the frame.

    A stride that divides the row width puts every anchor into the same few columns (stride 16 at width 80:
    five of them); one that is coprime to the frame visits all rows and columns in turn.
    """
    stride = AUTO_ANCHOR_STRIDE
    while math.gcd(stride, tokens_per_frame) != 1:
        stride += 1
    return stride


class AttentionOverrides(BaseModel):
    """What a request, a flag or the environment says about attention; the rest keeps its base value."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: AttentionBackend | None = None
    token_order: TokenOrder | None = None
    block_size: TokenCount | Literal["auto"] | None = None
    block_unit: WindowUnit | None = None
    tile_thw: TileSides | Literal["auto"] | None = None
    anchor_stride: AnchorStride | None = None
    anchor_offset: CountFromZero | None = None
    anchor_rotation: bool | None = None
    precision: AttentionPrecision | None = None
    window: CountFromZero | Literal["auto"] | None = None
    window_unit: WindowUnit | None = None
    global_frames: CountFromZero | None = None
    top_k: TopK | None = None
    pooled_rest: bool | None = None
    dense_steps: DenseSteps | None = None
    dense_layers: tuple[CountFromZero, ...] | None = None
    min_tokens: CountFromZero | None = None

    def over(self, base: AttentionConfig) -> AttentionConfig:
        """Base with these values on top.

        What block_topk shares with others means something else there (boxes, blocks), so a change to or from
        it starts these from their defaults.

        Raises:
            ValueError: a setting that the resulting backend does not have (it would have no effect), or the
                combination is invalid.
        """
        said = self.model_dump(exclude_none=True)
        backend = said.get("backend", base.backend)
        own = BACKEND_SETTINGS.get(backend, ())
        foreign = {name for names in BACKEND_SETTINGS.values() for name in names} - set(own)
        unused = sorted(set(said) - {"backend"} if backend == "dense" else set(said) & foreign)
        if unused:
            raise ValueError(f"{', '.join(unused)} has no effect with backend={backend}; leave it out")
        order = said.get("token_order", base.token_order)
        foreign = {name for other, names in ORDER_SETTINGS.items() if other != order for name in names}
        if backend == "anchor_local" and (unused := sorted(set(said) & foreign)):
            raise ValueError(f"{', '.join(unused)} has no effect with token_order={order}; leave it out")
        if "block_unit" in said and "block_size" not in said and base.block_size != "auto":
            raise ValueError("block_unit says what block_size counts; give both")
        kept = base.model_dump()
        if backend != base.backend and "block_topk" in (backend, base.backend):
            for name in set(BACKEND_SETTINGS["block_topk"]) & set(BACKEND_SETTINGS["anchor_local"]):
                del kept[name]
        return AttentionConfig.model_validate(kept | said)
