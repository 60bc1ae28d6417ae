"""The cancel flag and its hooks."""

import threading

import pytest
import torch
from torch import nn

from configs.job import JobCancelledError
from pipelines.cancel import CancelFlag, checked_inside

CPU = torch.device("cpu")


def test_check_passes_until_the_caller_says_so() -> None:
    answers = iter([False, False, True])
    flag = CancelFlag(lambda: next(answers))
    flag.check()
    flag.check()
    with pytest.raises(JobCancelledError):
        flag.check()


def test_set_cancels_without_asking_the_caller() -> None:
    def never() -> bool:
        raise AssertionError("asked")

    flag = CancelFlag(never)
    flag.set()
    with pytest.raises(JobCancelledError):
        flag.check()


def test_set_reaches_another_thread() -> None:
    flag, seen = CancelFlag(lambda: False), threading.Event()

    def work() -> None:
        try:
            while True:
                flag.check()
        except JobCancelledError:
            seen.set()

    thread = threading.Thread(target=work)
    thread.start()
    flag.set()
    thread.join()
    assert seen.is_set()


def test_a_call_stops_before_the_module_runs() -> None:
    ran: list[int] = []
    layers = nn.Sequential(*(nn.Identity() for _ in range(4)))
    for index, layer in enumerate(layers):
        layer.register_forward_hook(lambda module, inputs, output, index=index: ran.append(index))
    answers = iter([False, False, True])
    flag = CancelFlag(lambda: next(answers))
    with pytest.raises(JobCancelledError), checked_inside(list(layers), CPU, flag):
        layers(torch.zeros(1))
    assert ran == [0, 1]


def test_hooks_are_gone_afterwards() -> None:
    layer = nn.Identity()
    flag = CancelFlag(lambda: True)
    with pytest.raises(JobCancelledError), checked_inside([layer], CPU, flag):
        layer(torch.zeros(1))
    assert not layer._forward_pre_hooks
    layer(torch.zeros(1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_host_stays_close_to_the_gpu() -> None:
    device = torch.device("cuda", 0)
    layer = nn.Linear(8192, 8192, device=device, dtype=torch.bfloat16)
    rows = torch.zeros(8192, 8192, device=device, dtype=torch.bfloat16)
    behind: list[int] = []
    ends: list[torch.cuda.Event] = []

    def asked() -> bool:
        behind.append(sum(not end.query() for end in ends))
        return False

    with torch.no_grad(), checked_inside([layer], device, CancelFlag(asked)):
        for _ in range(50):
            layer(rows)
            ends.append(torch.cuda.current_stream(device).record_event())
    assert max(behind) <= 3
