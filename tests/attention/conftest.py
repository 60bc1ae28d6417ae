"""Triton kernels run through its interpreter where there is no GPU. Must be set before they are imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
