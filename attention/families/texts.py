"""How much text takes part in self-attention, and how much of that is padding, for each batch entry."""

import torch
from torch import Tensor

from attention.families.family import Arguments
from attention.forward import TextTokens


def all_valid(arguments: Arguments) -> TextTokens:
    """No mask: padding takes part like any text (CogVideoX)."""
    batch, count, _ = arguments["encoder_hidden_states"].shape
    return TextTokens(count, (count,) * batch)


def counted(arguments: Arguments) -> TextTokens:
    """A mask [batch, text]; as many tokens from the first on as it has ones (HunyuanVideo)."""
    mask: Tensor = arguments["encoder_attention_mask"]
    return TextTokens(mask.shape[1], tuple(mask.bool().sum(1).tolist()))


def leading(arguments: Arguments) -> TextTokens:
    """A mask [batch, text] that picks tokens, which must be the leading ones (Mochi)."""
    mask: Tensor = arguments["encoder_attention_mask"].bool()
    text = counted(arguments)
    if not bool((mask.cummin(1).values == mask).all()):
        raise ValueError("encoder_attention_mask must be ones and then zeros while self-attention is swapped")
    return text


def two_texts_and_image(arguments: Arguments) -> TextTokens:
    """Two texts with a mask each and an image that is there unless it is all zero (HunyuanVideo 1.5).

    The transformer puts what is valid before what is not.
    """
    names = ("encoder_hidden_states", "encoder_hidden_states_2", "image_embeds")
    first, second, image = (arguments[name].shape[1] for name in names)
    masks = (arguments[name].bool() for name in ("encoder_attention_mask", "encoder_attention_mask_2"))
    lengths = torch.cat([*masks], dim=1).sum(1).tolist()
    of_image = image if bool(arguments["image_embeds"].any()) else 0
    return TextTokens(first + second + image, tuple(of_image + length for length in lengths))
