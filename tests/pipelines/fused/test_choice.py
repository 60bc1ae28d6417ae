"""Who runs fused, and what is said of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from configs.compute import ComputeSettings, FusedMode
from configs.job import JobFailedError
from pipelines.fused.choice import FusedError, fuse, runs_fused
from pipelines.loading import load_pipeline
from tests.tiny_wan import tiny_preset, tiny_transformer, write_tiny_wan

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


def test_a_model_loads_fused_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preset = tiny_preset(write_tiny_wan(tmp_path))
    fused = ComputeSettings(compile="off", fused="on")
    assert runs_fused(load_pipeline(preset, dtype="float32", compute=fused).transformers)
    assert not runs_fused(load_pipeline(preset, dtype="float32").transformers)
    monkeypatch.setattr("pipelines.fused.choice.fuse_blocks", lambda transformer: 0)
    with pytest.raises(JobFailedError, match="fused=on, but the blocks of WanTransformer3DModel"):
        load_pipeline(preset, dtype="float32", compute=fused)
