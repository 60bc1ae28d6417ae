"""What a clip needs of a worker's device, by what the settings say of the VAE."""

import dataclasses

import pytest

from configs.compute import ComputeSettings, FusedMode, VaeDtype
from configs.memory import NO_MEMORY_OPTIONS
from configs.model_preset import BUNDLED_MODEL, find_model
from configs.resolve import GenerationRequest, resolve
from server.capacity import capacity
from server.workers import Worker

PRESET = find_model(BUNDLED_MODEL)
GPU = Worker(
    name="local",
    state="ready",
    message="",
    model=PRESET.name,
    device="cuda:0",
    dtype="bfloat16",
    load_seconds=1.0,
    supervisor_pid=1,
    worker_pid=2,
    gpus=1,
    memory_total_bytes=80 * 2**30,
    memory_in_use_bytes=None,
    files=None,
    heartbeat_at=0.0,
    heartbeat_age_seconds=0.0,
)
CPU = dataclasses.replace(GPU, device="cpu", dtype="float32")


def decode_peak(worker: Worker, fused: FusedMode = "auto", vae_dtype: VaeDtype = "auto") -> int:
    params = resolve(GenerationRequest(prompt="a red circle"), PRESET, PRESET.attention)
    compute = ComputeSettings(fused=fused, vae_dtype=vae_dtype)
    found = capacity(PRESET, NO_MEMORY_OPTIONS, compute, worker, [], params)
    assert found is not None
    return found.fit.peaks["vae_decode"]


@pytest.mark.parametrize("worker", [GPU, CPU])
def test_a_fused_decoder_needs_less(worker: Worker) -> None:
    auto, fused, stock = (decode_peak(worker, mode) for mode in ("auto", "on", "off"))
    assert fused < stock
    assert auto == (fused if worker is GPU else stock)


@pytest.mark.parametrize("worker", [GPU, CPU])
def test_the_vaes_own_format_counts(worker: Worker) -> None:
    assert decode_peak(worker) == decode_peak(worker, vae_dtype="float32")
    half = decode_peak(worker, vae_dtype="float16")
    assert half == decode_peak(worker, vae_dtype="bfloat16") < decode_peak(worker)
