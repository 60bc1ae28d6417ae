"""Memory of the device that jobs run on."""

import os

import pytest
import torch

from pipelines.device_memory import available_bytes, in_use_meter, total_bytes

CPU = torch.device("cpu")
MEBIBYTE = 2**20


def test_a_cpu_has_no_more_than_the_machine() -> None:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert in_use_meter(CPU)() < total_bytes(CPU) <= machine


def test_what_is_allocated_is_in_use_until_it_is_freed() -> None:
    meter = in_use_meter(CPU)
    before = meter()
    tensor = torch.ones(64 * MEBIBYTE, dtype=torch.uint8)
    assert 60 * MEBIBYTE < meter() - before < 100 * MEBIBYTE
    del tensor
    assert meter() - before < 30 * MEBIBYTE


def test_a_gpu_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    def fraction(device: torch.device) -> float:
        asked.append(device)
        return 0.5

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 20)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", fraction)
    assert available_bytes(torch.device("cuda")) == available_bytes(torch.device("cuda", 3)) == 50
    assert asked == [torch.device("cuda", 3)] * 2


@pytest.mark.gpu
def test_a_gpu_counts_its_own_memory() -> None:
    device = torch.device("cuda", 0)
    meter = in_use_meter(device)
    before = meter()
    tensor = torch.ones(64 * MEBIBYTE, dtype=torch.uint8, device=device)
    assert meter() - before == 64 * MEBIBYTE
    del tensor
    assert meter() == before
    assert before < total_bytes(device)
