"""The formulas of configs/memory.py against a count of live tensors, at true shapes on the meta device."""

from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel

from attention.diffusers_door import register_backend
from configs.geometry import VideoGeometry
from configs.memory import (
    ClipShape,
    ModelMemory,
    NetworkBytes,
    decode_bytes,
    denoise_bytes,
    most_chunks,
)
from configs.model_files import memory_of_files
from configs.model_preset import find_model
from pipelines import LoadedPipeline
from pipelines.feed_forward import sliced_feed_forward
from pipelines.fused.wan_vae import fuse_decoder
from tests.pipelines.live_bytes import LiveBytes
from tests.tiny_wan import tiny_preset, write_tiny_wan

TOLERANCE = 0.12
NO_WEIGHTS = NetworkBytes(total=0)
META = torch.device("meta")


def memory(
    *,
    heads: int = 12,
    ffn: int = 8960,
    dtype: torch.dtype = torch.bfloat16,
    vae_dtype: torch.dtype = torch.float32,
    wan22: bool = False,
    fused: bool = False,
) -> ModelMemory:
    """Wan 2.1's widths, or Wan 2.2 TI2V's VAE and timesteps."""
    return ModelMemory(
        text_encoder=NO_WEIGHTS,
        transformers=(NO_WEIGHTS,),
        vae=NO_WEIGHTS,
        dtype_bytes=dtype.itemsize,
        vae_dtype_bytes=vae_dtype.itemsize,
        hidden_size=heads * 128,
        feed_forward_size=ffn,
        head_dim=128,
        has_token_timesteps=wan22,
        text_tokens=512,
        text_hidden_size=4096,
        text_feed_forward_size=10240,
        text_heads=64,
        decoder_channels=256 if wan22 else 96,
        decoder_blocks=2,
        decoder_patch=2 if wan22 else 1,
        decoder_is_residual=wan22,
        decoder_is_fused=fused,
        geometry=VideoGeometry(vae_spatial=16 if wan22 else 8, vae_temporal=4, patch=(1, 2, 2)),
    )


def _attend(query: torch.Tensor, **others: object) -> torch.Tensor:
    return torch.empty_like(query)


def denoise_count(model: ModelMemory, clip: ClipShape, dtype: torch.dtype, chunks: int) -> int:
    """Live bytes of one pass of two blocks; attention, which fused kernels compute, makes its output only."""
    frames, rows, columns = model.geometry.token_grid(clip.width, clip.height, clip.num_frames)
    with META:
        transformer = WanTransformer3DModel(
            num_attention_heads=model.hidden_size // 128, ffn_dim=model.feed_forward_size, num_layers=2
        ).eval()
        for parameter in transformer.parameters():
            parameter.data = parameter.data.to(dtype)
        latents = torch.empty(clip.batch, 16, frames, 2 * rows, 2 * columns, dtype=dtype)
        shape = (clip.batch, frames * rows * columns) if model.has_token_timesteps else (clip.batch,)
        timestep, text = torch.empty(shape), torch.empty(clip.batch, 512, 4096, dtype=dtype)
    key = register_backend("live_bytes", _attend)
    for block in transformer.blocks:
        block.attn1.processor._attention_backend = block.attn2.processor._attention_backend = key
    count = LiveBytes()
    with torch.no_grad(), sliced_feed_forward([transformer], chunks), count:
        transformer(latents, timestep, text, return_dict=False)
    return count.peak


@pytest.mark.parametrize(
    ("model", "clip", "dtype"),
    [
        (memory(), ClipShape(832, 480, 81), torch.bfloat16),
        (memory(), ClipShape(832, 480, 81, batch=2), torch.bfloat16),
        (memory(heads=40, ffn=13824), ClipShape(1280, 720, 81), torch.bfloat16),
        (memory(heads=24, ffn=14336, wan22=True), ClipShape(1280, 704, 121), torch.bfloat16),
        (memory(dtype=torch.float32), ClipShape(832, 480, 41), torch.float32),
    ],
    ids=["1.3b", "1.3b-batched", "14b", "5b", "1.3b-float32"],
)
@pytest.mark.parametrize("sliced", [False, True], ids=["whole", "sliced"])
def test_a_pass_needs_what_the_formula_says(
    model: ModelMemory, clip: ClipShape, dtype: torch.dtype, sliced: bool
) -> None:
    chunks = most_chunks(model, clip) if sliced else 1
    counted = denoise_count(model, clip, dtype, chunks)
    assert denoise_bytes(model, clip, chunks) == pytest.approx(counted, rel=TOLERANCE)


@pytest.mark.parametrize("wan22", [False, True], ids=["wan2.1", "wan2.2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("fused", [False, True], ids=["stock", "fused"])
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_a_whole_decode_needs_what_the_formula_says(
    wan22: bool, dtype: torch.dtype, fused: bool, blocks: int
) -> None:
    model, clip = memory(wan22=wan22, vae_dtype=dtype, fused=fused), ClipShape(832, 480, 9)
    model = model.model_copy(update={"decoder_blocks": blocks})
    vae = _vae(wan22, dtype, blocks)
    if fused:
        fuse_decoder(vae)
    side = model.geometry.vae_spatial
    count = LiveBytes()
    with torch.no_grad(), META:
        latents = torch.empty(1, vae.config.z_dim, 3, 480 // side, 832 // side, dtype=dtype)
    with torch.no_grad(), count:
        hidden = vae.post_quant_conv(latents)
        for frame in range(3):  # as pipelines/wan.py does
            vae._conv_idx = [0]
            vae.decoder(
                hidden[:, :, frame : frame + 1],
                feat_cache=vae._feat_map,
                feat_idx=vae._conv_idx,
                first_chunk=frame == 0,
            )
    predicted = decode_bytes(model, clip, "whole")
    assert count.peak <= predicted <= (1 + TOLERANCE) * count.peak


@pytest.mark.parametrize("fused", [False, True], ids=["stock", "fused"])
@pytest.mark.parametrize("channels", [4, 96], ids=["clips", "a tile"])
def test_a_tiled_decode_needs_what_the_formula_says(channels: int, fused: bool) -> None:
    """With few channels the most lives when tiles are put together, else while one is decoded."""
    model = memory(fused=fused).model_copy(update={"decoder_channels": channels})
    clip = ClipShape(416, 256, 17)
    with META:
        vae = AutoencoderKLWan(base_dim=channels).eval()
        if fused:
            fuse_decoder(vae)
        latents = torch.empty(1, 16, 5, 32, 52)
    vae.enable_tiling(256, 256, 192, 192)
    count = LiveBytes()
    with torch.no_grad(), count:
        vae.decode(latents, return_dict=False)
    predicted = decode_bytes(model, clip, "tiled")
    assert count.peak <= predicted <= (1 + TOLERANCE) * count.peak


def _vae(wan22: bool, dtype: torch.dtype, blocks: int) -> AutoencoderKLWan:
    of_wan22: dict[str, object] = {
        "base_dim": 160,
        "decoder_base_dim": 256,
        "z_dim": 48,
        "patch_size": 2,
        "is_residual": True,
        "in_channels": 12,
        "out_channels": 12,
        "scale_factor_spatial": 16,
        "latents_mean": [0.0] * 48,
        "latents_std": [1.0] * 48,
    }
    with META:
        vae = AutoencoderKLWan(num_res_blocks=blocks, **(of_wan22 if wan22 else {})).eval()
        for parameter in vae.parameters():
            parameter.data = parameter.data.to(dtype)
    vae.clear_cache()
    return vae


def test_files_say_what_the_loaded_pipeline_says(loaded: LoadedPipeline) -> None:
    """Buffers that are made and not read (rotary tables) are in the pipeline only."""
    files, ours = memory_of_files(loaded.preset, 4, 4), loaded.memory
    networks = {"text_encoder", "vae", "transformers"}
    assert files.model_dump(exclude=networks) == ours.model_dump(exclude=networks)
    assert (files.text_encoder, files.vae) == (ours.text_encoder, ours.vae)
    assert files.text_encoder.tables == loaded.pipe.text_encoder.shared.weight.nbytes > 0
    assert files.transformers[0].blocks == ours.transformers[0].blocks
    rotary_tables = 2 * 1024 * 32 * 4  # positions, head_dim, float32
    assert ours.weights_bytes - files.weights_bytes == rotary_tables


def test_only_wans_decoder_is_taken_for_fused(tmp_path: Path) -> None:
    preset = tiny_preset(write_tiny_wan(tmp_path))
    assert memory_of_files(preset, 4, 4, fuses_wan_vae=True).decoder_is_fused
    assert not memory_of_files(preset, 4, 4).decoder_is_fused
    config = tmp_path / "vae" / "config.json"
    assert '"AutoencoderKLWan"' in config.read_text()
    config.write_text(config.read_text().replace("AutoencoderKLWan", "AutoencoderOfAnother"))
    assert not memory_of_files(preset, 4, 4, fuses_wan_vae=True).decoder_is_fused


def test_the_bundled_models_files_are_read() -> None:
    preset = find_model("reelwright-shapes")
    whole, half = memory_of_files(preset, 4, 4), memory_of_files(preset, 2, 2)
    assert whole.weights_bytes == 2 * half.weights_bytes
