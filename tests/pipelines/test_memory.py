"""Meters of peak memory see an allocation that is gone again when they are read."""

import gc

import numpy as np
import pytest
import torch

from pipelines.memory import (
    CudaPeak,
    LifetimePeak,
    PeakMeter,
    ResidentPeak,
    SampledPeak,
    peak_meter,
    release_memory,
)

SIZE_BYTES = 256 * 2**20
SLACK_BYTES = SIZE_BYTES // 4


def _touch_and_drop() -> None:
    # Above malloc's mmap threshold, so that dropping it returns it to the system at once.
    block = np.ones(SIZE_BYTES, dtype=np.uint8)
    for _ in range(3):
        block += 1
    del block
    gc.collect()


@pytest.mark.parametrize("meter_class", [ResidentPeak, SampledPeak])
def test_a_peak_is_seen_and_then_forgotten(meter_class: type[ResidentPeak] | type[SampledPeak]) -> None:
    quiet = meter_class()
    quiet.start()
    before = quiet.stop()
    busy = meter_class()
    busy.start()
    _touch_and_drop()
    peak = busy.stop()
    again = meter_class()
    again.start()
    after = again.stop()
    assert before + SIZE_BYTES - SLACK_BYTES < peak < before + SIZE_BYTES + SLACK_BYTES
    assert after < peak - SIZE_BYTES + SLACK_BYTES


def test_the_lifetime_peak_never_falls() -> None:
    meter = LifetimePeak()
    meter.start()
    before = meter.stop()
    _touch_and_drop()
    assert meter.stop() >= before
    # Resident bytes of this process, not kilobytes and not pages: torch alone takes more than 100 MB.
    assert 100 * 2**20 < before < 100 * 2**30


def test_linux_gets_the_exact_meter() -> None:
    meter: PeakMeter = peak_meter(torch.device("cpu"))
    assert type(meter) is (ResidentPeak if ResidentPeak.can_reset() else SampledPeak)


def test_releasing_cpu_memory_is_allowed() -> None:
    release_memory(torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_counts_what_torch_allocated() -> None:
    device = torch.device("cuda", 0)
    meter = peak_meter(device)
    assert type(meter) is CudaPeak
    meter.start()
    before = torch.cuda.memory_allocated(device)
    block = torch.empty(SIZE_BYTES, dtype=torch.uint8, device=device)
    del block
    assert meter.stop() == before + SIZE_BYTES
    release_memory(device)
    meter.start()
    assert meter.stop() == before
