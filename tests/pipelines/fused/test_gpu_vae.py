"""The fused video decoder on a GPU: at the widths of real models, against Diffusers' own."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from pipelines.fused import vae_kernels
from pipelines.fused.wan_vae import fuse_decoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
KINDS: dict[str, dict[str, Any]] = {
    "2.1": {"z_dim": 16},
    "2.2": {
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
    },
}
CHUNKS = 3


@pytest.fixture(autouse=True)
def _exact_and_without_gradients() -> Iterator[None]:
    """Convolutions in float32 are computed in it, not in TF32: errors are those of what is tested."""
    allowed = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    with torch.no_grad():
        yield
    torch.backends.cudnn.allow_tf32 = allowed


def built(kind: str, *, tiled: bool = False) -> Any:
    with torch.random.fork_rng(), torch.device("cuda"):
        torch.manual_seed(0)
        vae = AutoencoderKLWan(**KINDS[kind]).eval()
    if tiled:
        side = 6 * vae.spatial_compression_ratio
        vae.enable_tiling(side, side, side * 2 // 3, side * 2 // 3)
    return vae


def latents(kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, KINDS[kind]["z_dim"], CHUNKS, 8, 12, generator=generator)


def decoded(vae: Any, given: Tensor) -> Tensor:
    pictures: Tensor = vae.decode(given.to(vae.device, vae.dtype), return_dict=False)[0]
    return pictures


@lru_cache
def truth_of(kind: str, tiled: bool) -> Tensor:
    return decoded(built(kind, tiled=tiled).double(), latents(kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tiled", [False, True])
def test_pictures_are_as_near_to_float64_as_diffusers(
    kind: str, dtype: torch.dtype, tiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    vae, given, truth = built(kind, tiled=tiled).to(dtype), latents(kind), truth_of(kind, tiled)
    stock = decoded(vae, given)
    blocks = fuse_decoder(vae)
    launched = {"norm_silu_triton": 0, "add_triton": 0, "upsample_triton": 0}

    def count(name: str) -> None:
        launch = getattr(vae_kernels, name)

        def counted(*arguments: Any) -> None:
            launched[name] += 1
            launch(*arguments)

        monkeypatch.setattr(vae_kernels, name, counted)

    for name in launched:
        count(name)
    chunks: list[Tensor] = []
    vae.decoder.register_forward_hook(lambda module, given, out: chunks.append(out))
    found = decoded(vae, given)
    errors = [float((x.double() - truth).norm() / truth.norm()) for x in (found, stock)]
    # Sums in another order.
    assert errors[0] < 1.2 * errors[1] + 1e-6
    # Nothing took PyTorch's way for its layout.
    assert len(chunks) == CHUNKS * (6 if tiled else 1)
    assert launched == {
        "norm_silu_triton": len(chunks) * (2 * blocks + 1),
        "add_triton": len(chunks) * blocks,
        "upsample_triton": len(chunks) * 3,
    }


@pytest.mark.parametrize("kind", KINDS)
def test_the_peak_is_lower(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # As it is served: in float32 without TF32, cuDNN takes gigabytes of its own.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    vae, given = built(kind), latents(kind).repeat(1, 1, 1, 3, 3)
    peaks = []
    for fused in (False, True):
        if fused:
            fuse_decoder(vae)
        decoded(vae, given)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        decoded(vae, given)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < peaks[0]
