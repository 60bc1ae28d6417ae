"""The text encoders of Wan (UMT5) and of CogVideoX and LTX (T5), small and with random weights."""

from typing import Any

import torch
from transformers import T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

KINDS = ("umt5", "t5")
VOCABULARY = 64
_SIZES = {"vocab_size": VOCABULARY, "d_model": 48, "d_kv": 16, "d_ff": 96, "num_layers": 3, "num_heads": 3}


def text_encoder(kind: str) -> Any:
    """One of ``KINDS``."""
    torch.manual_seed(0)
    if kind == "umt5":
        return UMT5EncoderModel(UMT5Config(**_SIZES)).eval()
    return T5EncoderModel(T5Config(**_SIZES)).eval()
