"""Wan's self-attention with q, k and v from one product, normed and rotated where they lie.

Knows: Diffusers' Wan classes. Does not know: jobs, or what computes attention: that is the processor's
backend. One product needs one input, read (and in fp8 quantised) once. Without copies of q and k, a pass
holds five times the hidden states while attention runs: they, q, k, v and the result.
"""

from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_wan import (
    WanAttention,
    WanAttnProcessor,
    WanRotaryPosEmbed,
    WanTransformer3DModel,
)
from torch import Tensor, nn


def join_projections(transformer: Any) -> int:
    """Give every self-attention layer of a Wan transformer one product for q, k and v; returns how many.

    All or none: a layer with another processor, a LoRA, a hook or quantised weights keeps all as they are.
    The separate weights are gone afterwards; ``part_projections`` makes them again.
    """
    if type(transformer) is not WanTransformer3DModel or type(transformer.rope) is not WanRotaryPosEmbed:
        return 0
    layers: list[Any] = [block.attn1 for block in transformer.blocks]
    if not all(map(_may_join, layers)):
        return 0
    for layer in layers:
        layer.fuse_projections()
        layer.to_qkv.requires_grad_(layer.to_q.weight.requires_grad)
        del layer.to_q, layer.to_k, layer.to_v
        layer.__class__ = JoinedAttention
    transformer.rope.__class__ = PairTables
    return len(layers)


@torch.no_grad()
def part_projections(transformer: nn.Module) -> None:
    """Undo ``join_projections``: every class and weight is as it was."""
    for module in transformer.modules():
        if type(module) is JoinedAttention:
            module.unfuse_projections()
        elif type(module) is PairTables:
            module.__class__ = WanRotaryPosEmbed


class JoinedAttention(WanAttention):  # type: ignore[misc]  # Diffusers has no types
    """What a self-attention layer is then; Diffusers' own name of the joined weights is kept."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Hidden states [batch, tokens, channels] -> the same shape; tables of ``PairTables``."""
        foreign = type(self.processor) is not WanAttnProcessor
        if (
            foreign
            or rotary_emb is None
            or encoder_hidden_states is not None
            or attention_mask is not None
            or kwargs
        ):
            tables = None if rotary_emb is None else tuple(x.repeat_interleave(2, -1) for x in rotary_emb)
            out: Tensor = super().forward(
                hidden_states, encoder_hidden_states, attention_mask, tables, **kwargs
            )
            return out
        processor: Any = self.processor
        cos, sin = rotary_emb
        qkv = self.to_qkv(hidden_states)
        del hidden_states
        norm_and_rotate_(qkv, self.norm_q.weight, self.norm_k.weight, cos, sin, self.heads, self.norm_q.eps)
        q, k, v = (x.unflatten(2, (self.heads, -1)) for x in qkv.chunk(3, dim=-1))
        attended = dispatch_attention_fn(
            q,
            k,
            v,
            attn_mask=None,
            dropout_p=0.0,
            is_causal=False,
            backend=processor._attention_backend,
            parallel_config=processor._parallel_config,
        )
        del qkv, q, k, v
        result: Tensor = self.to_out[1](self.to_out[0](attended.flatten(2, 3)))
        return result

    @torch.no_grad()
    def unfuse_projections(self) -> None:
        """Three layers again.

        Raises:
            ValueError: their weights have been quantised since.
        """
        joined = self.to_qkv
        if type(joined) is not nn.Linear:
            raise ValueError(f"the joined projection is a {type(joined).__name__} by now; expected Linear")
        for name, weight, bias in zip(
            ("to_q", "to_k", "to_v"), joined.weight.chunk(3), joined.bias.chunk(3), strict=True
        ):
            with torch.device("meta"):
                layer = nn.Linear(joined.in_features, len(bias))
            layer.weight = nn.Parameter(weight.clone(), requires_grad=joined.weight.requires_grad)
            layer.bias = nn.Parameter(bias.clone(), requires_grad=joined.bias.requires_grad)
            setattr(self, name, layer.train(joined.training))
        super().unfuse_projections()
        self.__class__ = WanAttention


class PairTables(WanRotaryPosEmbed):  # type: ignore[misc]
    """Rotary tables with one entry for each pair of channels, where Diffusers has two alike."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, float32 [1, tokens, 1, head_dim / 2]."""
        cos, sin = super().forward(hidden_states)
        return cos[..., 0::2].contiguous(), sin[..., 1::2].contiguous()


@torch.library.custom_op("reelwright::norm_and_rotate_", mutates_args=("qkv",))
def norm_and_rotate_(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, heads: int, eps: float
) -> None:
    """RMS norm over all heads, then rotary embedding, of q and k in qkv [batch, tokens, 3 * channels].

    Weights [channels]; tables [1, tokens, 1, head_dim / 2], which turn neighbouring channels.
    """
    head_dim = qkv.shape[2] // 3 // heads
    dense = all(x.is_contiguous() for x in (qkv, q_weight, k_weight, cos, sin))
    if qkv.is_cuda and dense and head_dim & (head_dim - 1) == 0:
        from pipelines.row_kernels import norm_and_rotate_triton

        norm_and_rotate_triton(qkv, q_weight, k_weight, cos, sin, heads, eps)
        return
    for part, weight in zip(qkv.chunk(3, dim=-1)[:2], (q_weight, k_weight), strict=True):
        normed = nn.functional.rms_norm(part, weight.shape, weight, eps)
        even, odd = normed.unflatten(2, (heads, -1, 2)).unbind(-1)
        part.copy_(torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(2))


def _may_join(layer: Any) -> bool:
    if type(layer) is not WanAttention or layer.is_cross_attention or layer.add_k_proj is not None:
        return False
    projections = [layer.to_q, layer.to_k, layer.to_v]
    norms = [layer.norm_q, layer.norm_k]
    weights = {each.weight.dtype for each in (*projections, *norms) if each.weight is not None}
    return (
        type(layer.processor) is WanAttnProcessor
        and not layer.fused_projections
        and all(type(each) is nn.Linear and each.bias is not None for each in projections)
        and all(type(each) is nn.RMSNorm and each.weight is not None for each in norms)
        and layer.norm_q.eps == layer.norm_k.eps is not None
        and len(weights) == 1
        and not any(has_hooks(each) for each in (*projections, *norms))
    )


def has_hooks(module: nn.Module) -> bool:
    """Whether something watches the module's calls, or replaced them: then it is to be called."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
