"""Parts of a pipeline with random weights, made on the device that they are for.

Weights come from a normal distribution with a deviation of 0.02, norms begin at one and biases at zero, so
that signals stay finite through any depth. The same seed on the same device gives the same weights, which
``fingerprint`` proves.

Knows: Diffusers' and transformers' classes. Does not know: which models there are, or what is measured.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import diffusers
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import PreTrainedTokenizerFast

from benchmarks.architectures import Architecture, Component

DEVIATION = 0.02
SPECIAL_TOKENS = ("<pad>", "</s>", "<unk>")
WORDS = 1000
# Integer types as wide as the floating-point ones: their sums are exact.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def empty_module(component: Component, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
    """The part with whatever weights its class begins with; on ``meta`` with none.

    Weights that the class keeps in float32 when it is loaded in another type are in float32 here too.
    """
    with torch.device(device), _default_dtype(dtype):
        if component.config_class is None:
            module = getattr(diffusers, component.class_name)(**component.config)
        else:
            config = getattr(transformers, component.config_class)(**component.config)
            module = getattr(transformers, component.class_name)(config)
    if component.config_class is None:  # transformers keeps such weights in float32 beside float16 only
        kept = set(module._keep_in_fp32_modules or ())
        for name, parameter in module.named_parameters():
            if not kept.isdisjoint(name.split(".")):
                parameter.data = parameter.data.float()
    result: nn.Module = module.eval().requires_grad_(False)
    return result


def random_module(
    component: Component, device: torch.device | str, dtype: torch.dtype, seed: int
) -> nn.Module:
    """The part with random weights of ``seed``."""
    module = empty_module(component, device, dtype)
    fill(module, seed)
    return module


@torch.no_grad()
def fill(module: nn.Module, seed: int) -> None:
    """Random weights of that seed; norms one, biases zero."""
    first = next(module.parameters())
    generator = torch.Generator(first.device).manual_seed(seed)
    norms = {name for name, each in module.named_modules() if "norm" in type(each).__name__.lower()}
    for name, parameter in module.named_parameters():
        owner, _, leaf = name.rpartition(".")
        if leaf == "bias":
            parameter.zero_()
        elif owner in norms:
            parameter.fill_(1)
        else:
            parameter.normal_(0, DEVIATION, generator=generator)


@torch.no_grad()
def fingerprint(module: nn.Module) -> int:
    """A sum over the bits of all weights: equal for equal weights, and hardly ever for others."""
    total = 0
    for parameter in module.parameters():
        bits = parameter.contiguous().view(_BITS[parameter.element_size()])
        total = (total * 31 + int(bits.sum(dtype=torch.int64))) % 2**63
    return total


def weight_bytes(module: nn.Module) -> int:
    """Bytes of all weights."""
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def word_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A real tokenizer without a hub: the words ``w0`` to ``w999`` with numbers all over the vocabulary."""
    count = min(WORDS, vocabulary - len(SPECIAL_TOKENS))
    numbers = {name: number for number, name in enumerate(SPECIAL_TOKENS)}
    spread = (vocabulary - len(SPECIAL_TOKENS)) // count
    numbers |= {f"w{word}": len(SPECIAL_TOKENS) + word * spread for word in range(count)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", numbers["</s>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def random_pipeline(architecture: Architecture, device: torch.device, dtype: torch.dtype, seed: int) -> Any:
    """The whole stock pipeline on the device: text encoder and transformer in ``dtype``, VAE in float32.

    Raises:
        ValueError: the architecture is a transformer only, or has a kind of pipeline that is not built here.
    """
    if architecture.pipeline_class != "WanPipeline" or architecture.text_encoder is None:
        raise ValueError(f"{architecture.name} has no whole pipeline here; measure its step")
    parts: dict[str, Any] = {
        name: random_module(component, device, torch.float32 if name == "vae" else dtype, seed)
        for name, component in architecture.components.items()
    }
    scheduler = architecture.scheduler
    if scheduler is None:
        raise ValueError(f"{architecture.name} has no scheduler")
    vocabulary = int(str(architecture.text_encoder.config["vocab_size"]))
    pipe = getattr(diffusers, architecture.pipeline_class)(
        tokenizer=word_tokenizer(vocabulary),
        scheduler=getattr(diffusers, scheduler.class_name)(**scheduler.config),
        expand_timesteps=architecture.expand_timesteps,
        **parts,
    )
    pipe.register_to_config(_name_or_path=architecture.name)  # as from_pretrained leaves it
    pipe.set_progress_bar_config(disable=True)
    return pipe


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
