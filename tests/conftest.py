"""Settings of all tests."""

import os

import torch
from hypothesis import settings

# Without a GPU, Triton kernels run through its interpreter, chosen when any test first imports Triton.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# A slow, shared machine must not fail a property: time is never asserted.
settings.register_profile("reelwright", deadline=None)
settings.load_profile("reelwright")
