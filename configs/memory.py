"""How much memory a clip needs on the device, stage by stage, from numbers that a model's files hold.

Knows: sizes of weights, widths of layers, and formulas for what lives beside the weights. Does not know:
torch, devices, or how weights are moved. The formulas are those of Wan in eager mode: each is the sum of the
tensors that live at once at the worst point, counted on the meta device, against which
tests/pipelines/test_memory_formula.py holds them. What a library takes inside an operator is not in them.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Literal

from pydantic import BaseModel, ConfigDict

from configs.geometry import VideoGeometry

OffloadLevel = Literal["none", "encoder", "model", "group"]
OffloadChoice = Literal["auto", "none", "encoder", "model", "group"]
OFFLOAD_LEVELS: tuple[OffloadLevel, ...] = ("none", "encoder", "model", "group")
DeviceStage = Literal["text_encode", "denoise", "vae_decode"]
DEVICE_STAGES: tuple[DeviceStage, ...] = ("text_encode", "denoise", "vae_decode")
# Ways to decode on the device; the last resort, on the CPU, needs nothing there.
DeviceRung = Literal["whole", "tiled", "small_tiles"]
TILE_SIDES: dict[DeviceRung, int] = {"tiled": 256, "small_tiles": 128}

# Of the group level: the block that computes, the one before it, and the one that is on its way.
STREAMED_BLOCKS = 3
# A slice of the feed-forward with fewer tokens than this no longer fills a GPU.
MIN_CHUNK_TOKENS = 4096
_FLOAT32_BYTES = 4
# Bytes of float32 beside the layers' own number format, for each channel of each token: normalised,
# modulated, gated; and the same where every token has a timestep of its own.
_FLOAT32_PER_CHANNEL = 14
_FLOAT32_PER_TIMESTEP_CHANNEL = 28
# Full-size feature maps that live at once in a decoder, past frames that its convolutions keep included: of
# the rest of it, and of each residual block.
_DECODER_MAPS = 38.4
_RESIDUAL_DECODER_MAPS = 69.6
_FUSED_DECODER_MAPS = 24.2
_FUSED_RESIDUAL_DECODER_MAPS = 37.5
_MAPS_PER_BLOCK = 7.3
# Clips in pixels that live beside a tile, and at once when finished tiles are put together.
_CLIPS_BESIDE_A_TILE = 1.7
_TILED_CLIPS = 4.7


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """What an operator says of a device's memory.

    ``offload``: the level that jobs run at, or ``auto``. ``feed_forward_chunks``: slices of the feed-forward;
    None: those that lower a job's peak. ``limit_bytes``: most memory of the device that jobs may take; None:
    all of it.
    """

    offload: OffloadChoice = "auto"
    feed_forward_chunks: int | None = None
    limit_bytes: int | None = None


NO_MEMORY_OPTIONS = MemoryOptions()


class NetworkBytes(BaseModel):
    """Weights of one network, in bytes.

    ``block``: of its largest repeated block; ``blocks``: of all; ``tables``: of its tables of embeddings.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    total: int
    block: int = 0
    blocks: int = 0
    tables: int = 0

    @property
    def streamed(self) -> int:
        """What is on the device at once when blocks come and go, and tables stay on the host."""
        return self.total - self.tables - self.blocks + min(self.blocks, STREAMED_BLOCKS * self.block)


class ModelMemory(BaseModel):
    """What decides how much memory a model needs. Widths are in channels."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    text_encoder: NetworkBytes
    transformers: tuple[NetworkBytes, ...]
    vae: NetworkBytes
    dtype_bytes: int
    vae_dtype_bytes: int
    hidden_size: int
    feed_forward_size: int
    head_dim: int
    has_token_timesteps: bool = False
    text_tokens: int
    text_hidden_size: int
    text_feed_forward_size: int
    text_heads: int
    decoder_channels: int
    decoder_blocks: int
    decoder_patch: int = 1
    decoder_is_residual: bool = False
    decoder_is_fused: bool = False
    geometry: VideoGeometry

    @property
    def weights_bytes(self) -> int:
        """Of all networks."""
        return sum(part.total for part in (self.text_encoder, *self.transformers, self.vae))


@dataclass(frozen=True, slots=True)
class ClipShape:
    """Size and length in pixels and frames. ``batch``: clips in one pass (2: guidance as one batch)."""

    width: int
    height: int
    num_frames: int
    batch: int = 1

    @property
    def pixels(self) -> int:
        """Of one frame."""
        return self.width * self.height


def most_chunks(memory: ModelMemory, clip: ClipShape) -> int:
    """Beyond so many slices (a power of two) the feed-forward needs less than attention, and no less pays.

    Its hidden activations, before and after the activation function, are then no larger than q, k, v and the
    output of self-attention. Short clips are not sliced.
    """
    tokens, chunks = _pass_tokens(memory, clip), 1
    while (
        2 * memory.feed_forward_size > 4 * memory.hidden_size * chunks
        and tokens // (2 * chunks) >= MIN_CHUNK_TOKENS
    ):
        chunks *= 2
    return chunks


def _pass_tokens(memory: ModelMemory, clip: ClipShape) -> int:
    return prod(memory.geometry.token_grid(clip.width, clip.height, clip.num_frames)) * clip.batch


def denoise_bytes(memory: ModelMemory, clip: ClipShape, chunks: int) -> int:
    """Activations of one pass through the transformer, in ``chunks`` slices of the feed-forward."""
    tokens = _pass_tokens(memory, clip)
    width, size = memory.hidden_size, memory.dtype_bytes
    feed_forward = 2 * memory.feed_forward_size * size / chunks + 4 * width * size
    between = (_FLOAT32_PER_CHANNEL + 4 * size) * width
    timesteps = (_FLOAT32_PER_TIMESTEP_CHANNEL + 7 * size) * width if memory.has_token_timesteps else 0
    rotary = 2 * memory.head_dim * _FLOAT32_BYTES / clip.batch
    return ceil(tokens * (max(feed_forward, between) + timesteps + rotary))


def text_bytes(memory: ModelMemory) -> int:
    """Activations of one layer of the text encoder."""
    tokens, size = memory.text_tokens, memory.dtype_bytes
    rows = tokens * (6 * memory.text_hidden_size + 3 * memory.text_feed_forward_size) * size
    return rows + 2 * memory.text_heads * tokens**2 * (size + _FLOAT32_BYTES)


def decode_bytes(memory: ModelMemory, clip: ClipShape, rung: DeviceRung) -> int:
    """Activations of the VAE's decoder. Whole pictures leave the device frame by frame, tiles as one clip."""
    side = TILE_SIDES.get(rung)
    maps = _decoder_maps(memory) + _MAPS_PER_BLOCK * memory.decoder_blocks
    size = memory.vae_dtype_bytes
    pixels = clip.pixels if side is None else min(clip.pixels, side**2)
    decoder = pixels / memory.decoder_patch**2 * memory.decoder_channels * maps * size
    if side is None:
        return ceil(decoder)
    frames = 3 * clip.num_frames * clip.pixels * size
    return ceil(max(decoder + _CLIPS_BESIDE_A_TILE * frames, _TILED_CLIPS * frames))


def _decoder_maps(memory: ModelMemory) -> float:
    if memory.decoder_is_fused:
        return _FUSED_RESIDUAL_DECODER_MAPS if memory.decoder_is_residual else _FUSED_DECODER_MAPS
    return _RESIDUAL_DECODER_MAPS if memory.decoder_is_residual else _DECODER_MAPS


def resident_bytes(memory: ModelMemory, level: OffloadLevel) -> dict[DeviceStage, int]:
    """Weights on the device in each stage. Of two transformers, the levels from ``model`` on hold one.

    A text encoder that leaves the device comes block by block: that moves no more than coming as a whole.
    """
    text, vae, transformers = memory.text_encoder, memory.vae, memory.transformers
    if level == "group":
        return {
            "text_encode": text.streamed,
            "denoise": max(each.streamed for each in transformers),
            "vae_decode": vae.total,
        }
    if level == "model":
        return {
            "text_encode": text.streamed,
            "denoise": max(each.total for each in transformers),
            "vae_decode": vae.total,
        }
    if level == "encoder":
        rest = memory.weights_bytes - text.total
        return {"text_encode": rest + text.streamed, "denoise": rest, "vae_decode": rest}
    return dict.fromkeys(DEVICE_STAGES, memory.weights_bytes)


def sizes_of(weights: Mapping[str, int], block_name: str, table_names: Collection[str] = ()) -> NetworkBytes:
    """Bytes by weight name -> what counts; blocks are those whose name begins ``{block_name}.{number}.``."""
    blocks: dict[str, int] = {}
    for name, size in weights.items():
        if (number := _block(name, block_name)) is not None:
            blocks[number] = blocks.get(number, 0) + size
    return NetworkBytes(
        total=sum(weights.values()),
        block=max(blocks.values(), default=0),
        blocks=sum(blocks.values()),
        tables=sum(size for name, size in weights.items() if name in table_names),
    )


def _block(name: str, block_name: str) -> str | None:
    number = name.removeprefix(f"{block_name}.").partition(".")[0]
    return number if name.startswith(f"{block_name}.") and number.isdecimal() else None


def shorter_clip(memory: ModelMemory, clip: ClipShape, parts: int) -> ClipShape:
    """The same size, of 1 + ``parts`` times the frames that the VAE makes of one latent frame."""
    return replace(clip, num_frames=1 + parts * memory.geometry.vae_temporal)


def smaller_clip(memory: ModelMemory, clip: ClipShape, rows: int) -> ClipShape:
    """The same length, of so many times the least height, and nearly the same shape."""
    side = memory.geometry.side_multiple
    width = max(1, round(rows * clip.width / clip.height)) * side
    return replace(clip, width=width, height=rows * side)
