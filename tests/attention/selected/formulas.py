"""Compressed attention written out token by token from its definition, in float64: slow and plain.

Parameters come from a state dict, all else from the formulas. It shares no code with ``attention.selected``
but for the roundings, which have tests of their own.
"""

import math

import torch
from torch import Tensor

from attention.selected.config import CompressedAttentionConfig
from attention.selected.quantization import hadamard, through_fp4, through_fp8
from attention.selected.rotary import Rotary

Weights = dict[str, Tensor]


def rms(x: Tensor, weight: Tensor | float, eps: float) -> Tensor:
    """x over its root mean square, times the weight."""
    return weight * x / torch.sqrt((x * x).mean() + eps)


def turned(x: Tensor, position: int, rotary: Rotary) -> Tensor:
    """One vector, its last channels turned pair by pair as complex numbers."""
    out = x.clone()
    first = len(x) - rotary.dims
    for pair in range(rotary.dims // 2):
        angle = position * rotary.theta ** (-2 * pair / rotary.dims)
        a, b = float(x[first + 2 * pair]), float(x[first + 2 * pair + 1])
        value = complex(a, b) * complex(math.cos(angle), math.sin(angle))
        out[first + 2 * pair], out[first + 2 * pair + 1] = value.real, value.imag
    return out


def entries(
    x: Tensor, weights: Weights, prefix: str, ratio: int, overlap: bool, rotary: Rotary, eps: float
) -> Tensor:
    """[windows, width]: the entry of every whole window of x [tokens, dim]."""
    ape = weights[f"{prefix}ape"].double()
    kv = x @ weights[f"{prefix}wkv.weight"].double().T
    gate = x @ weights[f"{prefix}wgate.weight"].double().T
    width = ape.shape[1] // (2 if overlap else 1)
    results = []
    for window in range(len(x) // ratio):
        entry = torch.zeros(width, dtype=torch.float64)
        for channel in range(width):
            values, logits = [], []
            for slot in range(ratio):
                token = window * ratio + slot
                if overlap and window > 0:
                    values.append(kv[token - ratio, channel])
                    logits.append(gate[token - ratio, channel] + ape[slot, channel])
                own = channel + (width if overlap else 0)
                values.append(kv[token, own])
                logits.append(gate[token, own] + ape[slot, own])
            entry[channel] = torch.stack(logits).softmax(0) @ torch.stack(values)
        entry = rms(entry, weights[f"{prefix}norm.weight"].double(), eps)
        results.append(turned(entry, window * ratio, rotary))
    return torch.stack(results) if results else torch.zeros(0, width, dtype=torch.float64)


def stored(config: CompressedAttentionConfig, row: Tensor) -> Tensor:
    """A cached row: FP8 but for the channels that turn."""
    if not config.simulate_quantization:
        return row
    fixed, turning = row.split([config.head_dim - config.rotary.dims, config.rotary.dims])
    return torch.cat([through_fp8(fixed), turning])


def stored_in_index(config: CompressedAttentionConfig, row: Tensor) -> Tensor:
    """A query or an entry of the indexer: FP4 of its Hadamard transform."""
    return through_fp4(hadamard(row)) if config.simulate_quantization else row


def attention(config: CompressedAttentionConfig, weights: Weights, x: Tensor) -> Tensor:
    """One layer over one whole sequence x [tokens, dim]."""
    eps, rotary, heads = config.norm_eps, config.rotary, config.heads
    x = x.double()
    w = {name: tensor.double() for name, tensor in weights.items()}
    raw = [
        stored(config, turned(rms(w["wkv.weight"] @ token, w["kv_norm.weight"], eps), position, rotary))
        for position, token in enumerate(x)
    ]
    compressed = torch.zeros(0, config.head_dim)
    if config.ratio:
        compressed = entries(x, w, "compressor.", config.ratio, config.overlap, rotary, eps)
    if config.index:
        index_keys = entries(x, w, "indexer.compressor.", config.ratio, config.overlap, rotary, eps)
    outputs = []
    for position, token in enumerate(x):
        low_rank = rms(w["wq_a.weight"] @ token, w["q_norm.weight"], eps)
        keys = raw[max(0, position - config.window + 1) : position + 1]
        visible = (position + 1) // config.ratio if config.ratio else 0
        chosen = list(range(visible))
        if config.index:
            q = (w["indexer.wq_b.weight"] @ low_rank).view(config.index.heads, -1)
            head_weights = w["indexer.weights_proj.weight"] @ token
            head_weights = head_weights / math.sqrt(config.index.head_dim * config.index.heads)
            q = torch.stack([stored_in_index(config, turned(head, position, rotary)) for head in q])
            scores = [
                float(torch.relu(q @ stored_in_index(config, index_keys[j])) @ head_weights) for j in chosen
            ]
            chosen = sorted(chosen, key=lambda j: -scores[j])[: config.index.topk]
        rows = torch.stack([*keys, *(stored(config, compressed[j]) for j in chosen)])
        q = (w["wq_b.weight"] @ low_rank).view(heads, -1)
        attended = []
        for head in range(heads):
            query = turned(rms(q[head], 1.0, eps), position, rotary)
            logits = rows @ query / math.sqrt(config.head_dim)
            share = torch.cat([logits, w["attn_sink"][head : head + 1]]).softmax(0)[:-1]
            attended.append(turned(share @ rows, -position, rotary))
        groups = torch.cat(attended).view(config.out_groups, -1)
        low = [
            matrix @ group
            for matrix, group in zip(w["wo_a.weight"].chunk(config.out_groups), groups, strict=True)
        ]
        outputs.append(w["wo_b.weight"] @ torch.cat(low))
    return torch.stack(outputs)
