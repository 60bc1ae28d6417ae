"""Compressed attention: against its formulas, and portions of a sequence against the whole."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from attention.selected.config import CompressedAttentionConfig
from attention.selected.indexer import IndexConfig
from attention.selected.module import AttentionState, CompressedAttention
from attention.selected.rotary import Rotary
from tests.attention.selected import formulas

PLAIN = CompressedAttentionConfig(
    dim=12, heads=4, head_dim=10, q_rank=6, out_groups=2, out_rank=5, window=8, rotary=Rotary(4, 100.0)
)
INDEX = IndexConfig(heads=24, head_dim=6, topk=3)  # so many heads that no score is 0
TIES = replace(INDEX, heads=1)  # of one head half of the scores are
SMALL = {
    "window": PLAIN,
    "every 2nd": replace(PLAIN, ratio=2, overlap=True, index=INDEX),
    "every 3rd": replace(PLAIN, ratio=3),
    "every 4th": replace(PLAIN, ratio=4, overlap=True, index=INDEX),
    "longer than the window": replace(PLAIN, ratio=11),
    "overlap, all seen": replace(PLAIN, ratio=3, overlap=True),
    "plain, selected": replace(PLAIN, ratio=2, index=replace(INDEX, topk=5)),
    "equal scores": replace(PLAIN, ratio=2, overlap=True, index=TIES),
    "a window of one": replace(PLAIN, window=1, ratio=4, overlap=True, index=INDEX),
}
PUBLISHED = {ratio: replace(PLAIN, window=128, ratio=ratio) for ratio in (0, 128)} | {
    4: replace(PLAIN, window=128, ratio=4, overlap=True, index=replace(INDEX, topk=20))
}
QUANTIZED = replace(
    PLAIN,
    head_dim=68,
    ratio=4,
    overlap=True,
    index=replace(INDEX, head_dim=32, topk=4),
    simulate_quantization=True,
)


def layer(config: CompressedAttentionConfig, seed: int = 0) -> CompressedAttention:
    """A layer in float64 whose every parameter is random and matters."""
    generator = torch.Generator().manual_seed(seed)
    module = CompressedAttention(config, impl="torch").double()
    for name, parameter in module.named_parameters():
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        fan_in = parameter.shape[-1] ** 0.5 if name.endswith(".weight") and parameter.ndim == 2 else 1
        is_norm = name.endswith("norm.weight")
        parameter.data = (1 + values / 4 if is_norm else values / fan_in).float().double()
    return module


def tokens(config: CompressedAttentionConfig, batch: int, length: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, config.dim, generator=generator, dtype=torch.float64)


def whole(module: CompressedAttention, x: Tensor) -> Tensor:
    """All tokens in one call on a new state."""
    out: Tensor = module(x, module.new_state(len(x), x.shape[1]))
    return out


def decode(
    module: CompressedAttention, x: Tensor, state: AttentionState, lengths: Sequence[int]
) -> list[Tensor]:
    """The rest of each sequence of x, from these lengths on, one token a call; sequences stop as they end."""
    outputs: list[list[Tensor]] = [[] for _ in lengths]
    for step in range(x.shape[1] - min(lengths)):
        places = [min(length + step, x.shape[1] - 1) for length in lengths]
        counts = [int(length + step < x.shape[1]) for length in lengths]
        out = module(x[torch.arange(len(x)), places][:, None], state, counts)
        for sequence, count in enumerate(counts):
            if count:
                outputs[sequence].append(out[sequence, 0])
            else:
                assert bool((out[sequence] == 0).all())
    return [torch.stack(rows) if rows else x.new_zeros(0, x.shape[2]) for rows in outputs]


def poisoned(state: AttentionState) -> AttentionState:
    """The same state, with NaN wherever nothing was written."""
    caches = [state.cache, *([state.indexer.cache] if state.indexer else [])]
    for cache in caches:
        cache._storage.fill_(float("nan"))
    return state


@pytest.mark.parametrize("config", [*SMALL.values(), QUANTIZED], ids=[*SMALL, "quantised"])
def test_equals_the_formulas(config: CompressedAttentionConfig) -> None:
    module = layer(config)
    x = tokens(config, 1, 27)
    expected = formulas.attention(config, module.state_dict(), x[0])
    torch.testing.assert_close(whole(module, x)[0], expected)


@pytest.mark.parametrize("config", SMALL.values(), ids=SMALL)
def test_prefill_of_any_length_then_one_by_one(config: CompressedAttentionConfig) -> None:
    """Every length from 1 to 5 windows, each a sequence of one batch; the rest of each token by token."""
    module = layer(config)
    total = 5 * config.window + 1
    x = tokens(config, total - 1, total)
    expected = whole(module, x)
    lengths = list(range(1, total))
    state = poisoned(module.new_state(len(x), total))
    first = module(x[:, :-1], state, lengths)
    rest = decode(module, x, state, lengths)
    for sequence, length in enumerate(lengths):
        torch.testing.assert_close(first[sequence, :length], expected[sequence, :length])
        torch.testing.assert_close(rest[sequence], expected[sequence, length:])
        assert bool((first[sequence, length:] == 0).all())


@pytest.mark.parametrize("ratio", PUBLISHED)
def test_published_windows_and_ratios(ratio: int) -> None:
    config = PUBLISHED[ratio]
    module = layer(config)
    lengths = [1, 3, 4, 5, 127, 128, 129, 130, 255, 256, 257, 383, 384, 385, 511, 512, 513, 639, 640]
    x = tokens(config, len(lengths), 645)
    expected = whole(module, x)
    state = poisoned(module.new_state(len(x), 645))
    first = module(x[:, :640], state, lengths)
    for sequence, length in enumerate(lengths):
        torch.testing.assert_close(first[sequence, :length], expected[sequence, :length])
    few = 5  # and one sequence to its end below
    for step in range(few):
        places = [length + step for length in lengths]
        out = module(x[torch.arange(len(x)), places][:, None], state)
        torch.testing.assert_close(out[:, 0], expected[torch.arange(len(x)), places])


@pytest.mark.parametrize("ratio", PUBLISHED)
def test_published_windows_one_by_one_from_the_first_token(ratio: int) -> None:
    config = PUBLISHED[ratio]
    module = layer(config)
    x = tokens(config, 1, 5 * 128 + 2)
    (out,) = decode(module, x, poisoned(module.new_state(1, x.shape[1])), [0])
    torch.testing.assert_close(out, whole(module, x)[0])


@pytest.mark.parametrize("config", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("portions", [(1, 1, 2, 3, 7, 8, 9, 16, 2), (13, 1, 30, 1, 4), (7,) * 7])
def test_a_sequence_in_portions(config: CompressedAttentionConfig, portions: tuple[int, ...]) -> None:
    module = layer(config)
    x = tokens(config, 2, sum(portions))
    state = poisoned(module.new_state(2, x.shape[1]))
    out = torch.cat([module(part, state) for part in x.split(portions, dim=1)], dim=1)
    torch.testing.assert_close(out, whole(module, x))


def test_portions_in_float32_select_the_same_among_equal_scores() -> None:
    config = SMALL["equal scores"]
    module = CompressedAttention(config, impl="torch")
    x = torch.randn(1, 200, config.dim, generator=torch.Generator().manual_seed(0))
    state = module.new_state(1, 200)
    out = torch.cat([module(part, state) for part in x.split((1, 60, 3, 100, 36), dim=1)], dim=1)
    torch.testing.assert_close(out, module(x, module.new_state(1, 200)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", SMALL.values(), ids=SMALL)
def test_portions_of_a_batch_with_different_lengths(config: CompressedAttentionConfig) -> None:
    """Padding is NaN; sequences get nothing in some calls."""
    module = layer(config)
    x = tokens(config, 3, 40)
    expected = whole(module, x)
    state = poisoned(module.new_state(3, 40))
    done = [0, 0, 0]
    for counts in ((5, 0, 12), (1, 1, 0), (0, 20, 1), (9, 2, 7), (1, 1, 1), (8, 8, 8)):
        part = torch.full((3, max(counts), config.dim), float("nan"), dtype=torch.float64)
        for sequence, count in enumerate(counts):
            part[sequence, :count] = x[sequence, done[sequence] : done[sequence] + count]
        out = module(part, state, counts)
        for sequence, count in enumerate(counts):
            rows = expected[sequence, done[sequence] : done[sequence] + count]
            torch.testing.assert_close(out[sequence, :count], rows)
            assert bool((out[sequence, count:] == 0).all())
            done[sequence] += count
    assert state.lengths == done


@pytest.mark.parametrize("config", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("length", [1, 2, 3, 9, 30])
def test_a_second_sequence_knows_nothing_of_the_first(config: CompressedAttentionConfig, length: int) -> None:
    """Also one shorter than a window of the compressor, which would find the first's half."""
    module = layer(config)
    state = poisoned(module.new_state(1, 40))
    module(tokens(config, 1, 31, seed=5), state)
    state.reset()
    x = tokens(config, 1, 40)
    expected = whole(module, x)
    first = module(x[:, :length], state)
    torch.testing.assert_close(first, expected[:, :length])
    torch.testing.assert_close(decode(module, x, state, [length])[0], expected[0, length:])


def test_one_sequence_of_a_batch_begins_anew() -> None:
    config = SMALL["every 4th"]
    module = layer(config)
    x = tokens(config, 2, 30)
    expected, state = whole(module, x), module.new_state(2, 30)
    module(x[:, :11], state)
    with pytest.raises(ValueError, match=r"sequences must be 0 .. 1, got \[2, -1\]"):
        state.reset([1, 2, -1])
    assert state.lengths == [11, 11]
    state.reset([1])
    assert state.lengths == [11, 0]
    out = module(torch.stack([x[0, 11:30], x[1, :19]]), state)
    torch.testing.assert_close(out[0], expected[0, 11:])
    torch.testing.assert_close(out[1], expected[1, :19])


@pytest.mark.parametrize("name", ["window", "every 3rd", "every 4th"])
def test_no_token_sees_a_later_one(name: str) -> None:
    config = SMALL[name]
    module = layer(config)
    x = tokens(config, 1, 30)
    changed = x.clone()
    changed[:, 17] += 1
    same = (whole(module, x) - whole(module, changed)).abs().amax(2)[0]
    assert bool((same[:17] == 0).all())
    assert bool((same[17:25] > 0).all())


def test_low_precision_stays_close() -> None:
    """Projections, rows and weights rounded to bfloat16 in two layers of products."""
    config = replace(PLAIN, dim=64, heads=8, head_dim=64, q_rank=32, out_rank=32, ratio=3)
    module = layer(config)
    narrow = CompressedAttention(config, dtype=torch.bfloat16)
    narrow.load_state_dict(module.state_dict())
    x = tokens(config, 2, 30)
    exact = whole(module, x)
    out = whole(narrow, x.bfloat16())
    assert out.dtype == torch.bfloat16
    assert (out.double() - exact).norm() / exact.norm() < 3e-2
    assert {p.dtype for n, p in narrow.named_parameters() if "compressor" in n or "norm" in n} == {
        torch.float32
    }


def test_triton_runs_the_layer() -> None:
    config = SMALL["every 4th"]
    module = layer(config).float()
    x = tokens(config, 2, 20).float()
    expected = whole(module, x)
    module.impl = "triton"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    module, x = module.to(device), x.to(device)
    state = module.new_state(2, 20)
    out = torch.cat([module(part, state) for part in x.split((18, 1, 1), dim=1)], dim=1)
    torch.testing.assert_close(out.cpu(), expected)


def test_simulated_quantization_of_cached_rows() -> None:
    """Cached rows are what FP8 and FP4 can hold; the result moves a little, and portions still agree."""
    module = layer(QUANTIZED)
    x = tokens(QUANTIZED, 1, 30)
    state = module.new_state(1, 30)
    out = torch.cat([module(part, state) for part in x.split((9, 1, 1, 19), dim=1)], dim=1)
    torch.testing.assert_close(out, whole(module, x))
    exact = layer(replace(QUANTIZED, simulate_quantization=False))
    exact.load_state_dict(module.state_dict())
    moved = (out - whole(exact, x)).norm() / out.norm()
    assert 1e-3 < moved < 0.3
    rows = torch.cat([state.cache.ring, state.cache.entries[:, :7]], dim=1)[..., :64]
    assert len(rows.abs().unique()) < rows.numel() / 4  # 8 mantissas a binade: values repeat
    assert state.indexer is not None
    keys = state.indexer.cache.entries[:, :7]
    magnitudes = keys / keys.abs().amax(-1, keepdim=True)
    assert len(magnitudes.abs().unique()) <= 16  # 0 and 7 others, over a peak of 4 or 6 at most


def test_a_checkpoint_round_trip(tmp_path: Path) -> None:
    config = SMALL["every 4th"]
    module = layer(config)
    save_file(module.state_dict(), tmp_path / "layer.safetensors")
    other = layer(config, seed=9)
    other.load_state_dict(load_file(tmp_path / "layer.safetensors"))
    x = tokens(config, 1, 20)
    assert torch.equal(whole(other, x), whole(module, x))


def test_names_and_shapes_are_the_published_ones() -> None:
    config = replace(PLAIN, ratio=4, overlap=True, index=INDEX)
    compressor = {"ape": (4, 20), "wkv.weight": (20, 12), "wgate.weight": (20, 12), "norm.weight": (10,)}
    index_compressor = {"ape": (4, 12), "wkv.weight": (12, 12), "wgate.weight": (12, 12), "norm.weight": (6,)}
    expected = {
        "attn_sink": (4,),
        "wq_a.weight": (6, 12),
        "q_norm.weight": (6,),
        "wq_b.weight": (40, 6),
        "wkv.weight": (10, 12),
        "kv_norm.weight": (10,),
        "wo_a.weight": (10, 20),
        "wo_b.weight": (12, 10),
        **{f"compressor.{name}": shape for name, shape in compressor.items()},
        "indexer.wq_b.weight": (144, 6),
        "indexer.weights_proj.weight": (24, 12),
        **{f"indexer.compressor.{name}": shape for name, shape in index_compressor.items()},
    }
    assert {n: tuple(t.shape) for n, t in CompressedAttention(config).state_dict().items()} == expected


@pytest.mark.parametrize("wrong", ["scale", "dtype"])
def test_quantised_checkpoints_are_refused(wrong: str) -> None:
    state = layer(PLAIN).state_dict()
    if wrong == "scale":
        state["wq_a.scale"] = torch.ones(1, 1)
    else:
        state["wq_a.weight"] = state["wq_a.weight"].to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"wq_a\..* is part of a quantised weight"):
        CompressedAttention(PLAIN).load_state_dict(state)


def test_calls_that_do_not_fit() -> None:
    module = layer(PLAIN)
    state = module.new_state(2, 10)
    with pytest.raises(ValueError, match=r"x must be .* = \[2, length, 12\], got \(1, 3, 12\)"):
        module(tokens(PLAIN, 1, 3), state)
    with pytest.raises(ValueError, match=r"counts must be 2 numbers of tokens, 0 .. 3, got \[4, 0\]"):
        module(tokens(PLAIN, 2, 3), state, [4, 0])
    module(tokens(PLAIN, 2, 9), state)
    with pytest.raises(ValueError, match=r"may have 10 tokens, would have \[11, 11\]"):
        module(tokens(PLAIN, 2, 2), state)
    assert state.lengths == [9, 9]
    with pytest.raises(ValueError, match="batch and max_tokens must be at least 1, got 0 and 10"):
        module.new_state(0, 10)
    assert module(tokens(PLAIN, 2, 0), state).shape == (2, 0, 12)
