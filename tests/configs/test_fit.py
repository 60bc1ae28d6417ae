"""How a clip is fitted into memory, in plain numbers."""

from dataclasses import replace

import pytest

from configs.fit import GPU_RESERVE_BYTES, Room, choose, least, predict, rungs_of, what_would_fit
from configs.geometry import VideoGeometry
from configs.job import DecodeRung
from configs.memory import (
    MIN_CHUNK_TOKENS,
    OFFLOAD_LEVELS,
    ClipShape,
    ModelMemory,
    NetworkBytes,
    OffloadChoice,
    OffloadLevel,
    most_chunks,
    resident_bytes,
    sizes_of,
)

GIB = 2**30
# Wan 2.1 T2V 1.3B in bfloat16, its VAE in float32.
WAN = ModelMemory(
    text_encoder=NetworkBytes(
        total=11_361_820_672, block=385_892_352, blocks=9_261_416_448, tables=2_100_297_728
    ),
    transformers=(NetworkBytes(total=2_838_192_128, block=90_000_000, blocks=2_700_000_000),),
    vae=NetworkBytes(total=507_591_892),
    dtype_bytes=2,
    vae_dtype_bytes=4,
    hidden_size=1536,
    feed_forward_size=8960,
    head_dim=128,
    text_tokens=512,
    text_hidden_size=4096,
    text_feed_forward_size=10240,
    text_heads=64,
    decoder_channels=96,
    decoder_blocks=2,
    geometry=VideoGeometry(vae_spatial=8, vae_temporal=4, patch=(1, 2, 2)),
)
CLIP = ClipShape(832, 480, 81)


def gpu(gib: float, choice: OffloadChoice = "auto") -> Room:
    """A GPU of which so much can be used."""
    return Room.of(round(gib * GIB) + GPU_RESERVE_BYTES, is_gpu=True, choice=choice)


@pytest.mark.parametrize(
    ("gib", "level", "rung"),
    [
        (80, "none", "whole"),
        (20, "encoder", "whole"),
        (10, "model", "whole"),
        (7, "encoder", "tiled"),
        (3.8, "model", "tiled"),
        (3.6, "group", "tiled"),
    ],
)
def test_the_first_level_that_fits_is_taken(gib: float, level: str, rung: str) -> None:
    found = choose(WAN, CLIP, gpu(gib))
    assert found is not None
    assert (found.offload, found.rung) == (level, rung)
    assert found.peak_bytes <= gib * GIB


def test_what_fits_nowhere_is_none_and_the_least_is_told() -> None:
    assert choose(WAN, CLIP, gpu(1)) is None
    needed = least(WAN, CLIP, gpu(1))
    enough, short = (
        Room.of(needed.peak_bytes + GPU_RESERVE_BYTES - missing, is_gpu=True) for missing in (0, 1)
    )
    assert choose(WAN, CLIP, enough) is not None
    assert choose(WAN, CLIP, short) is None


def test_a_level_that_is_asked_for_is_the_only_one() -> None:
    assert choose(WAN, CLIP, gpu(3.6, "model")) is None
    found = choose(WAN, CLIP, gpu(80, "model"))
    assert found is not None
    assert found.offload == "model"


def test_lower_levels_hold_less() -> None:
    for stage in ("denoise", "vae_decode"):
        held = [resident_bytes(WAN, level)[stage] for level in OFFLOAD_LEVELS]
        assert held == sorted(held, reverse=True)
    assert resident_bytes(WAN, "none")["denoise"] == WAN.weights_bytes
    assert resident_bytes(WAN, "group")["denoise"] == 2_838_192_128 - 27 * 90_000_000
    assert resident_bytes(WAN, "group")["text_encode"] == 106_496 + 3 * 385_892_352


def test_a_cpu_has_one_level_and_its_tiles() -> None:
    room = Room.of(6 * GIB, is_gpu=False)
    assert choose(WAN, CLIP, room) is None
    room = Room.of(17 * GIB, is_gpu=False)
    found = choose(WAN, CLIP, room)
    assert found is not None
    assert (found.offload, found.rung) == ("none", "tiled")


def test_what_would_fit_fits_and_the_next_larger_does_not() -> None:
    room, asked = gpu(4), ClipShape(1280, 720, 241)
    assert choose(WAN, asked, room) is None
    shorter, smaller = what_would_fit(WAN, asked, room)
    assert (shorter.width, shorter.height) == (1280, 720)
    assert smaller.num_frames == 241
    assert smaller.width / smaller.height == pytest.approx(1280 / 720, rel=0.1)
    assert smaller.width % 16 == smaller.height % 16 == 0
    longer = replace(shorter, num_frames=shorter.num_frames + 4)
    larger = replace(smaller, width=smaller.width + 32, height=smaller.height + 16)
    assert [choose(WAN, clip, room) is None for clip in (shorter, longer, smaller, larger)] == [
        False,
        True,
        False,
        True,
    ]


def test_nothing_would_fit_into_nothing() -> None:
    assert what_would_fit(WAN, CLIP, gpu(0.1)) == []


def test_measured_factors_scale_activations_only() -> None:
    plain = predict(WAN, CLIP, "none", "whole")
    scaled = predict(WAN, CLIP, "none", "whole", factors={"denoise": 2.0})
    weights = WAN.weights_bytes
    assert scaled.peaks["denoise"] - weights == 2 * (plain.peaks["denoise"] - weights)
    assert scaled.peaks["vae_decode"] == plain.peaks["vae_decode"]


def test_rungs_that_repeat_another_are_left_out() -> None:
    assert rungs_of(ClipShape(128, 128, 9)) == ["whole"]
    assert rungs_of(ClipShape(256, 128, 9)) == ["whole", "small_tiles"]


@pytest.mark.parametrize(
    ("tokens", "chunks"), [(1, 1), (2 * MIN_CHUNK_TOKENS - 1, 1), (2 * MIN_CHUNK_TOKENS, 2), (10**6, 4)]
)
def test_long_clips_are_sliced_until_attention_needs_more(tokens: int, chunks: int) -> None:
    assert most_chunks(WAN, ClipShape(16 * tokens, 16, 1)) == chunks


@pytest.mark.parametrize("level", OFFLOAD_LEVELS)
@pytest.mark.parametrize("rung", ["whole", "tiled", "small_tiles", "cpu"])
@pytest.mark.parametrize("clip", [CLIP, ClipShape(1280, 720, 121), ClipShape(832, 480, 81, batch=2)])
def test_slices_are_made_only_where_they_lower_the_peak(
    level: OffloadLevel, rung: DecodeRung, clip: ClipShape
) -> None:
    found, most = predict(WAN, clip, level, rung), most_chunks(WAN, clip)
    peaks = [predict(WAN, clip, level, rung, chunks=chunks).peak_bytes for chunks in (1, 2, 4)]
    assert most == 4 or clip is CLIP
    assert found.peak_bytes == min(peaks[: most.bit_length()])
    assert (found.feed_forward_chunks == 1) == (peaks[0] == found.peak_bytes)


def test_an_ordinary_job_is_not_sliced_and_one_without_a_decode_is() -> None:
    assert predict(WAN, CLIP, "encoder", "whole").feed_forward_chunks == 1
    assert predict(WAN, CLIP, "encoder", "cpu").feed_forward_chunks == 2
    longer = ClipShape(832, 480, 161)
    assert predict(WAN, longer, "encoder", "cpu").feed_forward_chunks == 4


def test_blocks_are_told_by_their_names() -> None:
    weights = {
        "blocks.0.a": 3,
        "blocks.0.b": 4,
        "blocks.1.a": 5,
        "blocks.x": 2,
        "head": 1,
        "other.blocks.0": 9,
    }
    assert sizes_of(weights, "blocks") == NetworkBytes(total=24, block=7, blocks=12)
    assert sizes_of({"a": 1}, "blocks").streamed == 1
    assert NetworkBytes(total=100, block=10, blocks=80).streamed == 50


def test_tables_of_embeddings_are_told_by_their_names_and_stay_on_the_host() -> None:
    found = sizes_of({"blocks.0.a": 3, "table": 5, "tables": 7}, "blocks", ("table", "not_there"))
    assert found == NetworkBytes(total=15, block=3, blocks=3, tables=5)
    assert found.streamed == 10
