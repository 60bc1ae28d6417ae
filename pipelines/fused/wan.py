"""Wan's blocks with their norms, residuals and rotary embedding as single operators.

Knows: Diffusers' Wan classes, with q, k and v joined or not. Does not know: jobs, or what computes attention:
that is the processor's backend. Modules with large weights are called, so hooks on them stay in force; what a
block does not understand, the class it was does.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from diffusers.hooks._helpers import TransformerBlockRegistry
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.normalization import FP32LayerNorm
from diffusers.models.transformers.transformer_wan import (
    WanAttention,
    WanAttnProcessor,
    WanTransformer3DModel,
    WanTransformerBlock,
    _get_added_kv_projections,
)
from torch import Tensor, nn

from pipelines.feed_forward import OneFp8Operator, OneOperator
from pipelines.fp8 import Fp8Linear
from pipelines.fused.fp8_norms import add_norm_fp8, add_norm_fp8_, norm_fp8, quantised
from pipelines.fused.norms import (
    add_,
    add_norm,
    add_norm_,
    add_norm_both_,
    add_norm_over_,
    norm,
    reference_add,
)
from pipelines.fused.projection import norm_qkv, norm_v_
from pipelines.fused.rotary import norm_rotate_, norm_rotate_joined_, rms_norm_
from pipelines.fused.text_attention import attend_text_
from pipelines.joined_attention import has_hooks

# Rows of a block's modulation; the scale of a norm is the row after its shift.
SHIFT, GATE, FEED_FORWARD_SHIFT, FEED_FORWARD_GATE = 0, 2, 3, 5
# On Wan2.1-1.3B, 1,536 channels, less in blocks took longer and nothing off the peak (docs/notes.md).
MOST_NARROW_CHANNELS = 2048
IMAGE_TEXT_TOKENS = 512  # Diffusers' own number: what comes before so many tokens is of the image


class Modulation(NamedTuple):
    """Of a block: values [batch, tokens or 1, 6, channels], to which the table [1, 6, channels] is added."""

    values: Tensor
    table: Tensor | None


class Modulated(NamedTuple):
    """How hidden states are normed before self-attention, and whether it is to need little memory."""

    modulation: Modulation
    eps: float
    is_lean: bool


def fuse_blocks(transformer: nn.Module) -> int:
    """Have every block of a Wan transformer run so; returns how many, 0 if one of them is unusual.

    After weights are joined or quantised, and before blocks are compiled.
    """
    if type(transformer) is not WanTransformer3DModel:
        return 0
    of_transformer: Any = transformer.blocks
    blocks: list[Any] = list(of_transformer)
    if not all(map(_may_fuse, blocks)):
        return 0
    # Caches look a block's class up.
    TransformerBlockRegistry.register(FusedBlock, replace(TransformerBlockRegistry.get(WanTransformerBlock)))
    # Patches then come token by token, as the blocks, and what puts tokens in order, want them.
    _lay_out_patches(transformer, torch.channels_last_3d)
    for block in blocks:
        block.__class__ = FusedBlock
        for layer in (block.attn1, block.attn2):
            kind: Any = type(layer)
            layer.__class__ = _fused_attention(kind)
    return len(blocks)


def part_blocks(transformer: nn.Module) -> None:
    """Undo ``fuse_blocks``."""
    if any(isinstance(module, FusedBlock) for module in transformer.modules()):
        _lay_out_patches(transformer, torch.contiguous_format)
    for module in transformer.modules():
        if isinstance(module, FusedBlock | FusedAttention):
            module.__class__ = module.stock


class FusedBlock(WanTransformerBlock):  # type: ignore[misc]  # Diffusers has no types
    """What a block is then."""

    stock = WanTransformerBlock

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        rotary_emb: tuple[Tensor, Tensor],
    ) -> Tensor:
        """As of Diffusers' block. What comes in is not written to: caches keep it."""
        modulation = _modulation(temb, self.scale_shift_table)
        is_lean = getattr(self.ffn, "chunks", 1) > 1
        modulated = Modulated(modulation, self.norm1.eps, is_lean)
        attended = self.attn1(hidden_states, None, None, rotary_emb, modulated=modulated)
        hidden, normed, scale = self._add_norm2(hidden_states, attended, modulation, is_lean)
        del hidden_states, attended
        over = is_lean and normed is not hidden and self.attn2.may_write_over(normed.dtype)
        if scale is None and over:
            attended = self.attn2.forward_over(normed, encoder_hidden_states)
        elif scale is None:
            attended = self.attn2(normed, encoder_hidden_states, None, None)
        else:
            attended = self.attn2.forward_rows(normed, scale, encoder_hidden_states)
        del normed
        if type(self.ffn) is OneFp8Operator and not has_hooks(self.ffn):
            eps = self.norm3.eps
            normed, scale = add_norm_fp8_(
                hidden, attended, None, None, *modulation, -1, FEED_FORWARD_SHIFT, eps
            )
            del attended
            add_(hidden, self.ffn.forward_rows(normed, scale), *modulation, FEED_FORWARD_GATE)
            return hidden
        given = hidden, attended, None, None, *modulation, -1, FEED_FORWARD_SHIFT, self.norm3.eps
        if over:
            add_norm_both_(*given)
            normed = attended
        else:
            normed = add_norm_(*given)
        del attended, given
        if type(self.ffn) is OneOperator and not has_hooks(self.ffn):
            fed = self.ffn.forward_over(normed)
        else:
            fed = self.ffn(normed)
        add_(hidden, fed, *modulation, FEED_FORWARD_GATE)
        return hidden

    def _add_norm2(
        self, hidden: Tensor, x: Tensor, modulation: Modulation, is_lean: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The sum and its norm, the latter in e4m3 with scales if cross-attention takes it so.

        If memory counts, the norm lies where x was, unless somebody may have kept that.
        """
        if isinstance(self.norm2, nn.Identity):
            summed = reference_add(hidden, x, *modulation, GATE)
            return summed, summed, None
        given = hidden, x, self.norm2.weight, self.norm2.bias, *modulation, GATE, -1, self.norm2.eps
        if self.attn2.takes_rows():
            three: tuple[Tensor, Tensor, Tensor] = add_norm_fp8(*given)
            return three
        if is_lean and self.attn1.is_unwatched():
            return add_norm_over_(*given), x, None
        return *add_norm(*given), None


class FusedAttention(WanAttention):  # type: ignore[misc]
    """What an attention layer is then, in front of the class that it was."""

    stock: type = WanAttention

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
        modulated: Modulated | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """As of Diffusers' layer; hidden states are first normed and modulated, if that is given."""
        is_self = encoder_hidden_states is None
        unusual = attention_mask is not None or kwargs or is_self != (rotary_emb is not None)
        if unusual or type(self.processor) is not WanAttnProcessor:
            if modulated is not None:
                hidden_states = _normed(hidden_states, modulated)
            out: Tensor = super().forward(
                hidden_states, encoder_hidden_states, attention_mask, rotary_emb, **kwargs
            )
            return out
        if is_self:
            attended = self._attend_self(hidden_states, rotary_emb, modulated)
        else:
            attended = self._attend_text(self.to_q(hidden_states), encoder_hidden_states)
        return self._project(attended)

    def is_unwatched(self) -> bool:
        """Whether nobody but the caller has what the layer gives."""
        usual = type(self.processor) is WanAttnProcessor and not has_hooks(self)
        return usual and not any(map(has_hooks, self.to_out))

    def may_write_over(self, dtype: torch.dtype) -> bool:
        """Whether ``forward_over`` may be called instead of a layer of cross-attention."""
        out, dropout = self.to_out
        plain = _is_plain(self.to_q, dtype) and _is_plain(out, dtype) and type(dropout) is nn.Dropout
        inactive = plain and not (dropout.training and dropout.p)
        return (
            inactive and self._is_wide() and self.is_unwatched() and self.processor._attention_backend is None
        )

    def forward_over(self, hidden_states: Tensor, text: Tensor) -> Tensor:
        """Of hidden states [batch, tokens, channels] and text; written over the former."""
        q, norm, out = self.to_q, self.norm_q, self.to_out[0]
        attend_text_(
            hidden_states,
            q.weight,
            q.bias,
            norm.weight,
            norm.eps,
            *self._keys_and_values(text),
            out.weight,
            out.bias,
            self.heads,
        )
        return hidden_states

    def takes_rows(self) -> bool:
        """Whether ``forward_rows`` may be called instead of a layer of cross-attention."""
        usual = type(self.processor) is WanAttnProcessor and not has_hooks(self)
        return usual and _takes_rows(self.to_q)

    def forward_rows(self, rows: Tensor, scale: Tensor, text: Tensor) -> Tensor:
        """Of hidden states quantised to e4m3 [batch, tokens, channels] with scales [batch * tokens, 1]."""
        return self._project(self._attend_text(self.to_q.multiply_rows(rows, scale), text))

    def _project(self, attended: Tensor) -> Tensor:
        layer: Any = self.to_out[0]
        if _takes_rows(layer):
            projected: Tensor = layer.multiply_rows(*quantised(attended))
        else:
            projected = layer(attended)
        return self.to_out[1](projected)  # type: ignore[no-any-return]

    def _attend_self(self, hidden: Tensor, rotary: Any, modulated: Modulated | None) -> Tensor:
        rest = self.norm_q.weight, self.norm_k.weight, *rotary, self.heads, self.norm_q.eps
        if not self.fused_projections:
            q, k, v = self._separate(hidden, modulated)
            norm_rotate_(q, k, *rest)
        elif modulated is not None and modulated.is_lean and _is_plain(self.to_qkv, hidden.dtype):
            return self._attend_lean(hidden, rest, modulated)
        else:
            qkv = self._joined(hidden, modulated)
            norm_rotate_joined_(qkv, *rest)
            q, k, v = qkv.chunk(3, dim=-1)
            del qkv
            return self._dispatch(q, k, v, self.processor._parallel_config)
        # q lies apart, so that the result may take its place.
        return self._dispatch(q, k, v, self.processor._parallel_config, overwrites_query=True)

    def _attend_lean(self, hidden: Tensor, rest: Any, modulated: Modulated) -> Tensor:
        """With v of half of the heads at a time, if attention takes some of them."""
        norm, layer, processor = (*modulated.modulation, SHIFT, modulated.eps), self.to_qkv, self.processor
        head_dim = self.inner_dim // self.heads
        halves = self._is_wide() and getattr(processor, "takes_some_heads", False)
        first = (self.heads + 1) // 2 if halves else self.heads
        end = (2 * self.heads + first) * head_dim
        q, k, v = norm_qkv(hidden, *norm, layer.weight[:end], layer.bias[:end])
        norm_rotate_(q, k, *rest)
        q = self._dispatch(q, k, v, processor._parallel_config, overwrites_query=True)
        if first < self.heads:
            # Where the first v was, so that a compiled graph, too, makes this one after it was needed.
            norm_v_(v, hidden, *norm, layer.weight[end:], layer.bias[end:])
            v = v[..., : (self.heads - first) * head_dim]
            q = self._dispatch(q, k, v, processor._parallel_config, overwrites_query=True, first_head=first)
        return q

    def _is_wide(self) -> bool:
        return bool(self.inner_dim > MOST_NARROW_CHANNELS)

    def _joined(self, hidden: Tensor, modulated: Modulated | None) -> Tensor:
        """q, k and v [batch, tokens, 3 * channels]."""
        layer: Any = self.to_qkv
        if modulated is not None and _takes_rows(layer):
            return layer.multiply_rows(*_normed_fp8(hidden, modulated))  # type: ignore[no-any-return]
        return layer(hidden if modulated is None else _normed(hidden, modulated))  # type: ignore[no-any-return]

    def _separate(self, hidden: Tensor, modulated: Modulated | None) -> list[Tensor]:
        """q, k and v, each [batch, tokens, channels]."""
        layers = self.to_q, self.to_k, self.to_v
        if modulated is not None and all(map(_takes_rows, layers)):
            rows, scale = _normed_fp8(hidden, modulated)
            return [layer.multiply_rows(rows, scale) for layer in layers]
        normed = hidden if modulated is None else _normed(hidden, modulated)
        return [layer(normed) for layer in layers]

    def _attend_text(self, q: Tensor, text: Any) -> Tensor:
        rms_norm_(q, self.norm_q.weight, self.norm_q.eps)
        keys, values = self._keys_and_values(text)
        attended = [self._dispatch(q, k, v, None) for k, v in zip(keys, values, strict=True)]
        return sum(attended[1:], attended[0])

    def _keys_and_values(self, text: Any) -> tuple[list[Tensor], list[Tensor]]:
        """Of the text, and behind it of the image that there may be before the text."""
        image = None
        if self.add_k_proj is not None:
            images = text.shape[1] - IMAGE_TEXT_TOKENS
            image, text = text[:, :images], text[:, images:]
        if self.fused_projections:
            k, v = self.to_kv(text).chunk(2, dim=-1)
            k = k.contiguous()  # an operator that writes to one half of a product would copy all of it
        else:
            k, v = self.to_k(text), self.to_v(text)
        rms_norm_(k, self.norm_k.weight, self.norm_k.eps)
        if image is None:
            return [k], [v]
        image_k, image_v = _get_added_kv_projections(self, image)
        return [k, self.norm_added_k(image_k)], [v, image_v]

    def _dispatch(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        parallel_config: Any,
        *,
        overwrites_query: bool = False,
        first_head: int = 0,
    ) -> Tensor:
        """[batch, tokens, channels] -> the same; a backend that may overwrite q and can do so does.

        v may be that of some heads, the first of which is this one, if q may be overwritten.
        """
        q, k, v = (x.unflatten(2, (-1, self.inner_dim // self.heads)) for x in (q, k, v))
        out: Tensor = dispatch_attention_fn(
            q,
            k,
            v,
            attn_mask=None,
            dropout_p=0.0,
            is_causal=False,
            attention_kwargs={"overwrites_query": overwrites_query, "first_head": first_head},
            backend=self.processor._attention_backend,
            parallel_config=parallel_config,
        )
        return out.flatten(2, 3).type_as(q)


@lru_cache
def _fused_attention(kind: Any) -> type:
    if kind is WanAttention:
        return FusedAttention
    return type(f"Fused{kind.__name__}", (FusedAttention, kind), {"stock": kind})


def _modulation(temb: Tensor, table: Tensor) -> Modulation:
    """Of timestep embeddings [batch, 6, channels], or of each token [batch, tokens, 6, channels]."""
    if temb.ndim == 4:
        return Modulation(temb, table)
    return Modulation((table + temb.float())[:, None], None)


def _is_plain(layer: Any, dtype: torch.dtype) -> bool:
    """Whether a layer's weights may be used without calling it."""
    return type(layer) is nn.Linear and layer.weight.dtype == dtype and not has_hooks(layer)


def _takes_rows(layer: Any) -> bool:
    """Whether a layer may be given quantised rows, without calling it."""
    return type(layer) is Fp8Linear and not has_hooks(layer)


def _normed_fp8(hidden: Tensor, modulated: Modulated) -> tuple[Tensor, Tensor]:
    both: tuple[Tensor, Tensor] = norm_fp8(hidden, None, None, *modulated.modulation, SHIFT, modulated.eps)
    return both


def _normed(hidden: Tensor, modulated: Modulated) -> Tensor:
    out: Tensor = norm(hidden, None, None, *modulated.modulation, SHIFT, modulated.eps)
    return out


def _lay_out_patches(transformer: nn.Module, layout: torch.memory_format) -> None:
    patches: Any = transformer.patch_embedding
    patches.weight.data = patches.weight.data.contiguous(memory_format=layout)


def _may_fuse(block: Any) -> bool:
    plain_norms = [block.norm1, block.norm3]
    rms_norms = [each for layer in (block.attn1, block.attn2) for each in (layer.norm_q, layer.norm_k)]
    return (
        type(block) is WanTransformerBlock
        and all(type(each) is FP32LayerNorm and each.weight is None for each in plain_norms)
        and (type(block.norm2) is nn.Identity or _is_affine(block.norm2))
        and all(type(each) is nn.RMSNorm and each.weight is not None and each.eps for each in rms_norms)
        and block.attn1.norm_q.eps == block.attn1.norm_k.eps
        and block.attn1.add_k_proj is None
        and not any(has_hooks(each) for each in (*plain_norms, block.norm2, *rms_norms))
        and all(type(each.processor) is WanAttnProcessor for each in (block.attn1, block.attn2))
    )


def _is_affine(module: nn.Module) -> bool:
    return type(module) is FP32LayerNorm and module.weight is not None
