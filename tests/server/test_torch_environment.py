"""What the environment of a worker gets, and what of it the operator has chosen already."""

import os

import pytest

from server.torch_environment import set_up_torch_environment

ALLOCATOR, COMPILED = "PYTORCH_ALLOC_CONF", "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture(autouse=True)
def _empty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ALLOCATOR, "PYTORCH_CUDA_ALLOC_CONF", COMPILED, "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "")  # so that it is restored
    monkeypatch.setenv("HOME", "/home/somebody")


def test_compiled_code_lies_where_caches_do(monkeypatch: pytest.MonkeyPatch) -> None:
    set_up_torch_environment()
    assert os.environ[COMPILED] == "/home/somebody/.cache/reelwright/inductor"
    monkeypatch.setenv(COMPILED, "")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    set_up_torch_environment()
    assert os.environ[COMPILED] == "/caches/reelwright/inductor"


def test_what_the_operator_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {ALLOCATOR: "backend:native", COMPILED: "/cache/inductor"}
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    set_up_torch_environment()
    assert {name: os.environ[name] for name in chosen} == chosen
