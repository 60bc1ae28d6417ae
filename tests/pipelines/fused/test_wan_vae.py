"""A fused video decoder against Diffusers' own: the same pictures, of both Wan VAEs, whole and tiled."""

from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanResidualBlock
from diffusers.video_processor import VideoProcessor
from torch import Tensor, nn

from pipelines import wan
from pipelines.fused import vae_kernels, vae_norm, wan_vae
from pipelines.fused.wan_vae import fuse_decoder, part_decoder, runs_fused
from tests.pipelines.live_bytes import LiveBytes

LATENTS = 4
# How much of the pictures' scale roundings between layers may move them.
SHORT = {torch.float16: 2.0**-7, torch.bfloat16: 2.0**-4}


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def built(kind: str, blocks: int = 1) -> Any:
    of_kind: dict[str, Any] = {}
    if kind == "2.2":
        of_kind = {
            "decoder_base_dim": 12,
            "patch_size": 2,
            "is_residual": True,
            "in_channels": 12,
            "out_channels": 12,
            "scale_factor_spatial": 16,
        }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vae = AutoencoderKLWan(
            base_dim=8,
            z_dim=LATENTS,
            dim_mult=[1, 2, 4, 4],
            num_res_blocks=blocks,
            latents_mean=[0.1] * LATENTS,
            latents_std=[1.5] * LATENTS,
            **of_kind,
        )
        for parameter in vae.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return vae.eval()


def latents(frames: int, seed: int = 0, height: int = 6, width: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(seed + frames)
    return torch.randn(1, LATENTS, frames, height, width, generator=generator)


def parts(vae: Any, given: Tensor) -> list[Tensor]:
    """As a job decodes."""
    pipe = SimpleNamespace(vae=vae, video_processor=VideoProcessor())
    return list(wan.decoded_parts(pipe, given))


@pytest.mark.parametrize("kind", ["2.1", "2.2"])
@pytest.mark.parametrize("frames", [1, 2, 3, 5])
@pytest.mark.parametrize("tiled", [False, True])
def test_pictures_are_the_same_fused_and_before_and_after(kind: str, frames: int, tiled: bool) -> None:
    vae, given = built(kind), latents(frames)
    if tiled:
        side = 4 * vae.spatial_compression_ratio
        vae.enable_tiling(side, side, side // 2, side // 2)
    classes = {name: type(module) for name, module in vae.named_modules()}
    before = parts(vae, given)
    assert not runs_fused(vae)
    blocks = [kind for name, kind in classes.items() if name.startswith("decoder.")].count(WanResidualBlock)
    assert fuse_decoder(vae) == blocks > 0
    assert runs_fused(vae)
    assert fuse_decoder(vae) == 0  # it is already
    found, again = parts(vae, given), parts(vae, given)
    torch.testing.assert_close(found, before, rtol=0, atol=1e-5)
    assert all(map(torch.equal, found, again))
    part_decoder(vae)
    assert {name: type(module) for name, module in vae.named_modules()} == classes
    torch.testing.assert_close(parts(vae, given), before, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["2.1", "2.2"])
def test_nothing_of_a_cancelled_clip_is_left(kind: str) -> None:
    vae, given = built(kind), latents(3)
    expected = parts(vae, given)
    fuse_decoder(vae)
    pipe = SimpleNamespace(vae=vae, video_processor=VideoProcessor())
    interrupted: Any = wan.decoded_parts(pipe, latents(3, seed=9, height=4))
    for _ in range(2):
        next(interrupted)
    assert any(isinstance(each, Tensor) for each in vae._feat_map)
    interrupted.close()
    torch.testing.assert_close(parts(vae, given), expected, rtol=0, atol=1e-5)
    assert vae._feat_map == [None] * len(vae._feat_map)


@pytest.mark.parametrize("kind", ["2.1", "2.2"])
@pytest.mark.parametrize("dtype", SHORT, ids=str)
def test_short_formats_are_as_near_as_diffusers_own(kind: str, dtype: torch.dtype) -> None:
    vae, given = built(kind), latents(3)
    truth = torch.cat(parts(vae.double(), given)).float()
    vae = vae.to(dtype)
    stock = torch.cat(parts(vae, given)).float()
    fuse_decoder(vae)
    found = torch.cat(parts(vae, given)).float()
    errors = [float((each - truth).norm() / truth.norm()) for each in (found, stock)]
    assert errors[0] < min(1.1 * errors[1], SHORT[dtype])


def test_a_batch_and_no_cache() -> None:
    vae = built("2.1")
    given = torch.cat([latents(3), latents(3, seed=1)])
    expected, one = vae.decode(given).sample, vae.decoder(given)
    fuse_decoder(vae)
    torch.testing.assert_close(vae.decode(given).sample, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(vae.decoder(given), one, rtol=0, atol=1e-5)


def test_the_encoder_is_left_alone() -> None:
    vae = built("2.1")
    picture = torch.randn(1, 3, 5, 16, 16, generator=torch.Generator().manual_seed(0))
    expected = vae.encode(picture).latent_dist.mode()
    fuse_decoder(vae)
    assert torch.equal(vae.encode(picture).latent_dist.mode(), expected)
    assert not any(type(each) in wan_vae.FUSED.values() for each in vae.encoder.modules())


def hooked(module: nn.Module) -> None:
    module.register_forward_hook(lambda *_: None)


def dropping(vae: Any) -> None:
    vae.decoder.mid_block.resnets[0].dropout.p = 0.5


UNUSUAL: dict[str, Callable[[Any], None]] = {
    "hook on a norm": lambda vae: hooked(vae.decoder.mid_block.resnets[1].norm2),
    "hook on a convolution": lambda vae: hooked(vae.decoder.up_blocks[1].resnets[0].conv1),
    "hook on a shortcut": lambda vae: hooked(vae.decoder.up_blocks[1].resnets[0].conv_shortcut),
    "hook on a block": lambda vae: hooked(vae.decoder.up_blocks[0]),
    "hook on the last norm": lambda vae: hooked(vae.decoder.norm_out),
    "dropout": dropping,
    "activation": lambda vae: setattr(vae.decoder, "nonlinearity", nn.GELU()),
}


@pytest.mark.parametrize("change", UNUSUAL)
def test_an_unusual_decoder_is_left_alone(change: str) -> None:
    vae = built("2.1")
    UNUSUAL[change](vae)
    classes = [type(module) for module in vae.modules()]
    assert fuse_decoder(vae) == 0
    assert [type(module) for module in vae.modules()] == classes


def test_another_model_is_left_alone() -> None:
    assert fuse_decoder(nn.Linear(2, 2)) == 0


def test_hooks_on_residual_blocks_and_upsampling_are_called() -> None:
    vae, called = built("2.1"), []
    for each in (vae.decoder.up_blocks[0].resnets[0], vae.decoder.up_blocks[0].upsamplers[0]):
        each.register_forward_hook(lambda module, *_: called.append(type(module)))
    assert fuse_decoder(vae) > 0
    vae.decode(latents(1))
    assert called == [wan_vae.FusedResidualBlock, wan_vae.FusedResample]


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted then")
@pytest.mark.parametrize("kind", ["2.1", "2.2"])
def test_kernels_run_wherever_they_can(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, between convolutions that keep channels last, as cuDNN's do."""
    vae, given = built(kind), latents(3, height=3, width=2)
    expected = parts(vae, given)
    for name, layout in (("conv2d", torch.channels_last), ("conv3d", torch.channels_last_3d)):
        convolve = getattr(nn.functional, name)

        def kept(*given: Any, convolve: Any = convolve, layout: Any = layout, **options: Any) -> Tensor:
            out: Tensor = convolve(*given, **options)
            return out.contiguous(memory_format=layout)

        monkeypatch.setattr(nn.functional, name, kept)
    monkeypatch.setattr(vae_norm, "_is_of_gpu", lambda x: True)
    launched: Counter[str] = Counter()
    for name in ("norm_silu_triton", "add_triton", "upsample_triton"):
        launch = getattr(vae_kernels, name)

        def counted(*given: Any, name: str = name, launch: Any = launch) -> None:
            launched[name] += 1
            launch(*given)

        monkeypatch.setattr(vae_kernels, name, counted)
    blocks = fuse_decoder(vae)
    torch.testing.assert_close(parts(vae, given), expected, rtol=0, atol=1e-5)
    # Of three chunks.
    assert launched == {
        "norm_silu_triton": 3 * (2 * blocks + 1),
        "add_triton": 3 * blocks,
        "upsample_triton": 3 * 3,
    }


@pytest.mark.parametrize("kind", ["2.1", "2.2"])
def test_fewer_bytes_live_at_once(kind: str) -> None:
    peaks = []
    for fused in (False, True):
        vae = built(kind).to("meta")
        if fused:
            fuse_decoder(vae)
        with LiveBytes() as count:
            list(parts_on_meta(vae, latents(3).to("meta")))
        peaks.append(count.peak)
    assert peaks[1] < 0.85 * peaks[0]


def parts_on_meta(vae: Any, given: Tensor) -> Iterator[Tensor]:
    vae.clear_cache()
    hidden = vae.post_quant_conv(given)
    for frame in range(hidden.shape[2]):
        vae._conv_idx = [0]
        yield vae.decoder(
            hidden[:, :, frame : frame + 1],
            feat_cache=vae._feat_map,
            feat_idx=vae._conv_idx,
            first_chunk=frame == 0,
        )
