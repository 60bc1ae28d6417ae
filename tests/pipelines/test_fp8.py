"""Linear layers in fp8: their error, where they are refused, and which layers take part."""

import pytest
import torch
from torch import nn

from configs.compute import ComputeSettings
from configs.job import JobFailedError
from configs.model_preset import ModelPreset
from pipelines import load_pipeline
from pipelines.fp8 import FORMAT, LARGEST, Fp8Error, Fp8Linear, quantise_rows, require_fp8, to_fp8

# Half a step of e4m3 (3 bits of mantissa) relative to its value.
HALF_STEP = 2.0**-4


def test_rows_are_quantised_to_the_nearest() -> None:
    x = torch.randn(7, 32, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 7)[:, None]
    quantised, scale = quantise_rows(x)
    assert quantised.dtype == FORMAT
    back = quantised.float() * scale
    smallest_normal = 2.0**-6 * scale
    assert bool(((back - x).abs() <= HALF_STEP * torch.maximum(x.abs(), smallest_normal)).all())
    torch.testing.assert_close(quantised.float().abs().amax(dim=1), torch.full((7,), LARGEST))


def test_a_row_of_zeros_stays_zero() -> None:
    quantised, scale = quantise_rows(torch.zeros(1, 16))
    assert not quantised.float().any()
    assert bool(scale.isfinite().all())


def test_the_layer_is_the_product_of_what_was_quantised() -> None:
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(64, 48).bfloat16()
    nn.init.normal_(linear.weight, generator=generator)
    nn.init.normal_(linear.bias, generator=generator)
    x = torch.randn(2, 5, 64, generator=generator).bfloat16()
    with torch.no_grad():
        layer = Fp8Linear(linear)
        out = layer(x)
    rows, scale = quantise_rows(x.reshape(-1, 64))
    weight = layer.weight.double() * layer.weight_scale.t().double()
    truth = (rows.double() * scale.double()) @ weight.t() + linear.bias.double()
    assert out.shape == (2, 5, 48)
    assert out.dtype == torch.bfloat16
    # bfloat16 holds 8 bits.
    torch.testing.assert_close(out.view(-1, 48).double(), truth, rtol=2.0**-7, atol=2.0**-5)
    relative = (out.float() - linear(x).float()).norm() / linear(x).float().norm()
    assert 0 < relative < 2 * HALF_STEP


def test_only_layers_of_fitting_sides_are_replaced() -> None:
    block = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 24), nn.LayerNorm(24))
    assert to_fp8([block]) == 1
    assert [type(child) for child in block] == [Fp8Linear, nn.Linear, nn.LayerNorm]
    with pytest.raises(Fp8Error, match="no linear layer whose sides are multiples of 16"):
        to_fp8([nn.Linear(8, 8)])


def test_a_cpu_is_refused(preset: ModelPreset) -> None:
    with pytest.raises(JobFailedError, match=r"precision=fp8 needs a GPU .*, not cpu") as caught:
        load_pipeline(preset, device="cpu", compute=ComputeSettings(precision="fp8"))
    assert caught.value.code == "model_load_failed"


def test_a_gpu_without_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(Fp8Error, match=r"compute capability 8\.9 or newer; A100 has 8\.0"):
        require_fp8(torch.device("cuda", 0), torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    require_fp8(torch.device("cuda", 0), torch.bfloat16)
    with pytest.raises(Fp8Error, match="needs dtype=bfloat16, not float32"):
        require_fp8(torch.device("cuda", 0), torch.float32)
