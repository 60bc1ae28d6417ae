"""The processor of joint attention: what Diffusers' own ones do, with our operator in the middle.

Knows projections, norms and rotary embedding of a layer. Does not know which tokens see which. It takes the
place of processors that bypass Diffusers' dispatcher (CogVideoX, Mochi) or build a mask of tokens x tokens
before they ask it (HunyuanVideo 1.5).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attention.forward import swapped_attention

Rotate = Callable[[Tensor, Any], Tensor]


class JointProcessor:
    """Self-attention of text and clip. The attention module keeps all weights, and so LoRA and quantisation.

    Text goes first and back to front: padding, which comes last, then lies at the very beginning, and what is
    left of a batch entry is one slice. Text has no positions here, so its order means nothing.
    """

    def __init__(self, rotate: Rotate, *, masked: bool, dense_layer: bool, layer: int) -> None:
        self._rotate = rotate
        self._masked = masked
        self._dense_layer = dense_layer
        self._layer = layer

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """Clip [batch, tokens, channels] and text, to the same."""
        if attention_mask is not None and not self._masked:
            raise ValueError("swapped self-attention of this model takes no attention_mask")
        text = encoder_hidden_states.flip(1)
        project = _projected_together if attn.add_q_proj is None else _projected_apart
        q, k, v = project(attn, hidden_states, text, lambda x: self._rotated(x, image_rotary_emb))
        out = swapped_attention(q, k, v, q.shape[-1] ** -0.5, self._dense_layer, self._layer)
        together = out.flatten(2, 3).to(q.dtype)
        if attn.add_q_proj is None:
            together = _through(attn.to_out, together)
        text_out, clip_out = together.split([text.shape[1], hidden_states.shape[1]], dim=1)
        if attn.add_q_proj is not None:
            clip_out = _through(attn.to_out, clip_out)
            to_add_out = getattr(attn, "to_add_out", None)  # Mochi's last layer has none
            text_out = text_out if to_add_out is None else to_add_out(text_out)
        return clip_out, text_out.flip(1)

    def _rotated(self, x: Tensor, image_rotary_emb: Any) -> Tensor:
        return x if image_rotary_emb is None else self._rotate(x, image_rotary_emb)


Rotated = Callable[[Tensor], Tensor]


def _projected_together(
    attn: Any, clip: Tensor, text: Tensor, rotated: Rotated
) -> tuple[Tensor, Tensor, Tensor]:
    """One set of projections for both; [batch, text and clip, heads, head_dim]."""
    both, count = torch.cat([text, clip], dim=1), text.shape[1]
    q, k, v = (_heads(attn, projection(both)) for projection in (attn.to_q, attn.to_k, attn.to_v))

    def positioned(x: Tensor, norm: Any) -> Tensor:
        x = _normed(norm, x)
        return torch.cat([x[:, :count], rotated(x[:, count:])], dim=1)

    return positioned(q, attn.norm_q), positioned(k, attn.norm_k), v


def _projected_apart(
    attn: Any, clip: Tensor, text: Tensor, rotated: Rotated
) -> tuple[Tensor, Tensor, Tensor]:
    """Text has projections and norms of its own."""
    q = rotated(_normed(attn.norm_q, _heads(attn, attn.to_q(clip))))
    k = rotated(_normed(attn.norm_k, _heads(attn, attn.to_k(clip))))
    v = _heads(attn, attn.to_v(clip))
    text_q = _normed(attn.norm_added_q, _heads(attn, attn.add_q_proj(text)))
    text_k = _normed(attn.norm_added_k, _heads(attn, attn.add_k_proj(text)))
    text_v = _heads(attn, attn.add_v_proj(text))
    return (
        torch.cat([text_q, q], dim=1),
        torch.cat([text_k, k], dim=1),
        torch.cat([text_v, v], dim=1),
    )


def _heads(attn: Any, x: Tensor) -> Tensor:
    heads: Tensor = x.unflatten(2, (attn.heads, -1))
    return heads


def _normed(norm: Any, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def _through(to_out: Any, x: Tensor) -> Tensor:
    """Output projection and dropout; HunyuanVideo's single blocks have them elsewhere."""
    return x if to_out is None else to_out[1](to_out[0](x))


def rotate_pairs(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Mochi's rotary embedding: cosines and sines [tokens, heads, head_dim / 2], in float32."""
    cos, sin = tables
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    first, second = even * cos - odd * sin, even * sin + odd * cos
    return torch.stack([first.to(x.dtype), second.to(x.dtype)], dim=-1).flatten(-2)
