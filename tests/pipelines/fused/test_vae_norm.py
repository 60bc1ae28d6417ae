"""What lies between the convolutions of a video decoder: operators and kernels, these interpreted without a
GPU, against float64."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import WanRMS_norm
from torch import Tensor
from torch.nn.functional import interpolate, silu

from pipelines.fused.vae_kernels import add_triton, norm_silu_triton, upsample_triton
from pipelines.fused.vae_norm import add_, norm_silu_, upsample
from tests.attention.compiled import SHARED_BYTES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Of one rounding, beside float32's of the sums. Triton's interpreter cuts bfloat16 off.
BFLOAT16 = 2.0**-8 if DEVICE == "cuda" else 2.0**-7
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2.0**-11, torch.bfloat16: BFLOAT16}
# Wan's, odd, few.
CHANNELS = [1, 12, 96, 129, 384, 1024]
PAST = 2


def pictures(channels: int, dtype: torch.dtype, seed: int = 0, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed + channels)
    made = torch.randn(batch, channels, 3, 4, 5, generator=generator) * 3
    return made.to(DEVICE, dtype).contiguous(memory_format=torch.channels_last_3d)


def values(channels: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(channels, generator=torch.Generator().manual_seed(seed + channels)).to(DEVICE, dtype)


def room(x: Tensor) -> Tensor:
    """For x behind past frames; all of it NaN."""
    batch, channels, frames, *sides = x.shape
    made = torch.full((batch, channels, PAST + frames, *sides), float("nan"), dtype=x.dtype, device=x.device)
    return made.contiguous(memory_format=torch.channels_last_3d)


def stock(x: Tensor, shift: Tensor | None, gamma: Tensor, bias: Tensor | None) -> Tensor:
    """Diffusers' own, in float64."""
    norm = WanRMS_norm(x.shape[1], images=False, bias=bias is not None).to(x.device, torch.float64)
    wide = x.double()
    with torch.no_grad():
        norm.gamma.copy_(gamma.view_as(norm.gamma))
        if bias is not None:
            norm.bias.copy_(bias.view_as(norm.bias))
        if shift is not None:
            wide = wide + shift.double().view(-1, 1, 1, 1)
        found: Tensor = silu(norm(wide))
    return found


def assert_near(found: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", [norm_silu_triton, norm_silu_], ids=["kernel", "operator"])
@pytest.mark.parametrize("affine", [False, True])
def test_a_norm_is_diffusers_and_stays_in_its_room(
    channels: int, dtype: torch.dtype, kernel: object, affine: bool
) -> None:
    x, gamma = pictures(channels, dtype), values(channels, dtype, 1)
    shift, bias = (values(channels, dtype, seed) if affine else None for seed in (2, 3))
    buffer = room(x)
    x[0, :, 1, 1, 1] = 0
    kernel(buffer[:, :, PAST:], x, shift, gamma, bias)  # type: ignore[operator]
    assert_near(buffer[:, :, PAST:], stock(x, shift, gamma, bias))
    assert bool(buffer[:, :, :PAST].isnan().all())


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", [add_triton, add_], ids=["kernel", "operator"])
@pytest.mark.parametrize("shifted", [False, True])
def test_a_residual(channels: int, dtype: torch.dtype, kernel: object, shifted: bool) -> None:
    x, buffer = pictures(channels, dtype), room(pictures(channels, dtype, seed=1))
    other = buffer[:, :, PAST:].copy_(pictures(channels, dtype, seed=1))
    shift = values(channels, dtype, 2) if shifted else None
    expected = x.double() + other.double()
    if shift is not None:
        expected += shift.double().view(-1, 1, 1, 1)
    roundings = 8 if kernel is add_ and shifted else 1  # PyTorch rounds twice, and sums may nearly cancel
    kernel(x, shift, other)  # type: ignore[operator]
    tolerance = roundings * TOLERANCE[dtype]
    torch.testing.assert_close(x.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("kernel", [norm_silu_triton, norm_silu_], ids=["kernel", "operator"])
def test_what_is_not_finite_is_not_hidden(bad: float, kernel: object) -> None:
    x, gamma = pictures(12, torch.float32), values(12, torch.float32, 1)
    x[1, 3, 2, 1, 1] = bad
    out = torch.empty_like(x)
    kernel(out, x, None, gamma, None)  # type: ignore[operator]
    assert torch.equal(out.isnan(), stock(x, None, gamma, None).isnan())
    assert bool(out.isnan().any())


def test_another_layout_is_no_other_result() -> None:
    x, gamma = pictures(12, torch.float32), values(12, torch.float32, 1)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    norm_silu_(out, x.contiguous(), None, gamma, None)
    assert_near(out, stock(x, None, gamma, None))
    other = pictures(12, torch.float32, seed=1).contiguous()
    expected = x + other
    add_(x, None, other)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("frames", [1, 2])
@pytest.mark.parametrize("is_kernel", [True, False], ids=["kernel", "operator"])
def test_upsampling_moves_every_value(
    channels: int, dtype: torch.dtype, frames: int, is_kernel: bool
) -> None:
    x = pictures(frames * channels, dtype)
    batch, _, time, height, width = x.shape
    if is_kernel:
        found = torch.full((batch * time * frames, channels, 2 * height, 2 * width), float("nan")).to(x)
        found = found.contiguous(memory_format=torch.channels_last)
        upsample_triton(found, x, frames)
    else:
        found = upsample(x, frames)
    # As Diffusers' WanResample does.
    apart = x.reshape(batch, frames, channels, time, height, width)
    pairs = torch.stack(apart.unbind(1), 3).reshape(batch, channels, time * frames, height, width)
    expected = interpolate(
        pairs.transpose(1, 2).flatten(0, 1).float(), scale_factor=(2.0, 2.0), mode="nearest-exact"
    )
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(found, expected.to(dtype))


def test_no_pictures() -> None:
    empty, gamma = pictures(12, torch.float32)[:, :, :0], values(12, torch.float32, 1)
    norm_silu_triton(empty, empty, None, gamma, None)
    add_triton(empty, None, empty)
    upsample_triton(torch.empty(0, 12, 8, 10, device=DEVICE), empty, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_schema_and_fake_tell_the_truth(dtype: torch.dtype) -> None:
    # They are for inference: nothing is registered for gradients.
    checks = ("test_schema", "test_faketensor")
    x, gamma = pictures(12, dtype), values(12, dtype, 1)
    torch.library.opcheck(norm_silu_, (torch.empty_like(x), x, None, gamma, gamma), test_utils=checks)
    torch.library.opcheck(upsample, (x, 2), test_utils=checks)
    torch.library.opcheck(add_, (x, gamma, pictures(12, dtype, seed=1)), test_utils=checks)


@pytest.mark.parametrize("capability", [89, 90])
def test_kernels_compile_and_read_whole_vectors(capability: int, tmp_path: Path) -> None:
    targets = [f"{capability}-{channels}-{dtype}" for channels in (96, 1024) for dtype in ("fp32", "fp16")]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.pipelines.fused.compile_vae_kernels", *targets],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    found = [case for line in run.stdout.splitlines() for case in json.loads(line)]
    assert len(found) == len(targets) * 5
    for case in found:
        assert (case["ld_bits"], case["st_bits"]) == (128, 128), case
        assert case["shared_bytes"] < SHARED_BYTES[capability]
