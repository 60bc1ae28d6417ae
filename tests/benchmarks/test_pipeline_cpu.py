"""The CPU benchmark of whole jobs, on a tiny model."""

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.pipeline_cpu import Variant, measure, ours, psnr_db, stock, table
from configs.attention import AttentionOverrides
from configs.resolve import GenerationRequest, resolve
from tests.tiny_wan import tiny_preset, write_tiny_wan


def test_rows_of_the_plain_pipeline_and_of_ours(tmp_path: Path) -> None:
    preset = tiny_preset(write_tiny_wan(tmp_path / "model"))
    request = GenerationRequest(
        prompt="a red circle", seed=1, attention=AttentionOverrides(backend="dense"), num_inference_steps=2
    )
    params = resolve(request, preset, preset.attention)
    variants = [
        Variant("plain", stock(preset, params, torch.float32)),
        Variant("ours", ours(preset, params, "float32")),
    ]
    plain, own = measure(variants, params, repeats=1)
    assert (plain.variant, plain.job_ratio, plain.psnr_db) == ("plain", 1.0, None)
    assert own.job_ratio == pytest.approx(own.job_seconds / plain.job_seconds)
    assert own.job_seconds > own.step_seconds > 0
    assert "| ours |" in table([plain, own])


def test_psnr_of_a_known_error() -> None:
    black, grey = np.zeros((1, 2, 2, 3), np.uint8), np.full((1, 2, 2, 3), 51, np.uint8)
    assert psnr_db(black, grey) == pytest.approx(20 * np.log10(5))
    assert psnr_db(black, black) is None
