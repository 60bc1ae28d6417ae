"""What a profile says of operators of our own: by what they do, not by whose they are."""

import torch

from pipelines.fused.norms import norm
from pipelines.fused.projection import norm_qkv
from pipelines.profiling import entries


def test_fused_operators_are_no_attention() -> None:
    hidden, modulation = torch.ones(1, 4, 8), torch.ones(1, 1, 6, 8)
    weight, bias = torch.ones(24, 8), torch.ones(24)
    norm(hidden, None, None, modulation, None, 0, 1e-6)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        norm(hidden, None, None, modulation, None, 0, 1e-6)
        norm_qkv(hidden, modulation, None, 0, 1e-6, weight, bias)
    kinds = {entry.name: entry.kind for entry in entries(profile.events(), on_gpu=False)}
    assert kinds["reelwright::fused_norm"] == "elementwise"
    assert kinds["aten::addmm"] == "linear"
    assert "attention" not in kinds.values()
