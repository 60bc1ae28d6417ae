"""Settings of all tests."""

import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator

import pytest
import structlog
import torch
from hypothesis import settings

# Without a GPU, Triton kernels run through its interpreter, chosen when any test first imports Triton.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# A slow, shared machine must not fail a property: time is never asserted.
settings.register_profile("reelwright", deadline=None)
settings.load_profile("reelwright")


@pytest.fixture(autouse=True)
def _logging_of_its_own() -> Iterator[None]:
    """A command that a test runs in this process sets up its logging; the next test must not see that."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    hooks = (sys.excepthook, threading.excepthook, warnings.showwarning, sys.warnoptions[:])
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)
    sys.excepthook, threading.excepthook, warnings.showwarning, sys.warnoptions[:] = hooks


@pytest.fixture(autouse=True, scope="module")
def _nothing_compiled() -> None:
    """Torch counts the variants that a process has compiled of a function, also those of other files."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
