"""Who runs fused, and what is said of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from configs.compute import ComputeSettings, FusedMode
from configs.job import JobFailedError
from pipelines.fused.choice import FusedError, fuse, fuse_vae, runs_fused
from pipelines.fused.wan_vae import runs_fused as decoder_runs_fused
from pipelines.loading import load_pipeline
from tests.tiny_wan import tiny_preset, tiny_transformer, tiny_vae, write_tiny_wan

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("device", "dtype", "mode", "is_fused"),
    [
        (GPU, torch.bfloat16, "auto", True),
        (GPU, torch.float16, "auto", True),
        (GPU, torch.float32, "auto", False),
        (GPU, torch.bfloat16, "off", False),
        (CPU, torch.bfloat16, "auto", False),
        (CPU, torch.float32, "on", True),
    ],
)
def test_the_mode_the_device_and_the_format_decide(
    device: torch.device, dtype: torch.dtype, mode: FusedMode, is_fused: bool
) -> None:
    transformer: Any = tiny_transformer()
    assert fuse([transformer], device, dtype, mode) == (len(transformer.blocks) if is_fused else 0)
    assert runs_fused([transformer]) == is_fused


def test_on_fails_where_auto_lets_be() -> None:
    other = nn.Linear(2, 2)
    assert fuse([other], GPU, torch.bfloat16, "auto") == 0
    with pytest.raises(FusedError, match="fused=on, but the blocks of Linear"):
        fuse([tiny_transformer(), other], GPU, torch.bfloat16, "on")


@pytest.mark.parametrize(
    ("device", "mode", "is_fused"),
    [
        (GPU, "auto", True),
        (GPU, "off", False),
        (CPU, "auto", False),
        (CPU, "on", True),
    ],
)
def test_the_mode_and_the_device_decide_for_a_vae(
    device: torch.device, mode: FusedMode, is_fused: bool
) -> None:
    vae = tiny_vae()
    assert (fuse_vae(vae, device, mode) > 0) == is_fused == decoder_runs_fused(vae)


def test_on_fails_for_another_vae() -> None:
    assert fuse_vae(nn.Linear(2, 2), GPU, "auto") == 0
    with pytest.raises(FusedError, match="fused=on, but the decoder of Linear is none that can be fused"):
        fuse_vae(nn.Linear(2, 2), GPU, "on")


def test_a_model_loads_fused_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preset = tiny_preset(write_tiny_wan(tmp_path))
    fused = ComputeSettings(compile="off", fused="on")
    loaded, stock = load_pipeline(preset, dtype="float32", compute=fused), load_pipeline(preset, device="cpu")
    assert runs_fused(loaded.transformers)
    assert loaded.decodes_fused
    assert loaded.memory.decoder_is_fused
    assert not runs_fused(stock.transformers)
    assert not stock.decodes_fused
    assert not stock.memory.decoder_is_fused
    monkeypatch.setattr("pipelines.fused.choice.fuse_blocks", lambda transformer: 0)
    with pytest.raises(JobFailedError, match="fused=on, but the blocks of WanTransformer3DModel"):
        load_pipeline(preset, dtype="float32", compute=fused)
