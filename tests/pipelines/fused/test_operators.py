"""What operators say of themselves holds, on the CPU and on a GPU, and both compute the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pipelines.fused import projection
from pipelines.fused.norms import add_, add_norm, add_norm_, add_norm_both_, add_norm_over_, norm
from pipelines.fused.projection import norm_qkv, norm_v_
from pipelines.fused.rotary import norm_rotate_, norm_rotate_joined_, rms_norm_
from pipelines.fused.text_attention import attend_text_

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
EPS = 1e-6
BATCH, TOKENS, HEADS, HEAD_DIM = 2, 5, 3, 8
CHANNELS = HEADS * HEAD_DIM


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def hidden(seed: int = 0) -> Tensor:
    return noise(BATCH, TOKENS, CHANNELS, seed=seed)


def modulation(tokens: int) -> Tensor:
    return noise(BATCH, tokens, 6, CHANNELS)


def weights() -> tuple[Tensor, Tensor]:
    return noise(CHANNELS, seed=1), noise(CHANNELS, seed=2)


def tables() -> tuple[Tensor, Tensor]:
    return noise(1, TOKENS, 1, HEAD_DIM, seed=3), noise(1, TOKENS, 1, HEAD_DIM, seed=4)


def linear(rows: int) -> tuple[Tensor, Tensor]:
    return noise(rows, CHANNELS), noise(rows)


def values(heads: int) -> Tensor:
    return noise(BATCH, TOKENS, heads * HEAD_DIM)


def texts(*lengths: int) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values."""
    keys, values = ([noise(BATCH, length, CHANNELS, seed=seed) for length in lengths] for seed in (5, 6))
    return keys, values


# Of each an operator and what it is given; one with modulation of the clip, one of each token.
CALLS: dict[str, tuple[Any, Callable[[], tuple[Any, ...]]]] = {
    "norm": (norm, lambda: (hidden(), None, None, modulation(1), None, 0, EPS)),
    "norm, tokens": (
        norm,
        lambda: (hidden(), None, None, modulation(TOKENS), noise(1, 6, CHANNELS), 3, EPS),
    ),
    "add_norm": (
        add_norm,
        lambda: (hidden(), hidden(1), *weights(), modulation(1), None, 2, -1, EPS),
    ),
    "add_norm_": (
        add_norm_,
        lambda: (hidden(), hidden(1), None, None, modulation(1), None, -1, 3, EPS),
    ),
    "add_norm_over_": (
        add_norm_over_,
        lambda: (hidden(), hidden(1), *weights(), modulation(1), None, 2, -1, EPS),
    ),
    "add_norm_both_": (
        add_norm_both_,
        lambda: (hidden(), hidden(1), None, None, modulation(1), None, -1, 3, EPS),
    ),
    "add_": (add_, lambda: (hidden(), hidden(1), modulation(TOKENS), noise(1, 6, CHANNELS), 5)),
    "norm_rotate_": (
        norm_rotate_,
        lambda: (hidden(), hidden(1), *weights(), *tables(), HEADS, EPS),
    ),
    "norm_rotate_joined_": (
        norm_rotate_joined_,
        lambda: (noise(BATCH, TOKENS, 3 * CHANNELS), *weights(), *tables(), HEADS, EPS),
    ),
    "rms_norm_": (rms_norm_, lambda: (hidden(), weights()[0], EPS)),
    "norm_qkv": (
        norm_qkv,
        lambda: (hidden(), modulation(1), None, 0, EPS, *linear(3 * CHANNELS)),
    ),
    "norm_qkv, tokens": (
        norm_qkv,
        lambda: (
            hidden(),
            modulation(TOKENS),
            noise(1, 6, CHANNELS),
            0,
            EPS,
            *linear(2 * CHANNELS + 2 * HEAD_DIM),
        ),
    ),
    "norm_v_": (
        norm_v_,
        lambda: (values(2), hidden(), modulation(1), None, 0, EPS, *linear(2 * HEAD_DIM)),
    ),
    "norm_v_, tokens": (
        norm_v_,
        lambda: (
            values(2),
            hidden(),
            modulation(TOKENS),
            noise(1, 6, CHANNELS),
            0,
            EPS,
            *linear(HEAD_DIM),
        ),
    ),
    "attend_text_": (
        attend_text_,
        lambda: (hidden(), *linear(CHANNELS), weights()[0], EPS, *texts(7), *linear(CHANNELS), HEADS),
    ),
    "attend_text_, image": (
        attend_text_,
        lambda: (hidden(), *linear(CHANNELS), weights()[0], EPS, *texts(7, 4), *linear(CHANNELS), HEADS),
    ),
}


def given(name: str, device: str) -> tuple[Any, ...]:
    return _mapped(lambda x: x.to(device), CALLS[name][1]())


def _mapped(change: Callable[[Tensor], Tensor], values: tuple[Any, ...]) -> tuple[Any, ...]:
    mapped: tuple[Any, ...] = torch.utils._pytree.tree_map_only(Tensor, change, values)
    return mapped


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("device", DEVICES)
def test_schema_and_fake_tell_the_truth(name: str, device: str) -> None:
    # They are for inference: nothing is registered for gradients.
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(CALLS[name][0], given(name, device), test_utils=checks)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("device", DEVICES)
def test_float64_says_the_same(name: str, device: str) -> None:
    operator = CALLS[name][0]
    short = given(name, device)
    long = _mapped(lambda x: x.cpu().double(), short)
    # What is given back, and what was written to.
    found, expected = (_tensors(operator(*values), values) for values in (short, long))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu().double(), other, rtol=1e-5, atol=1e-5)


def _tensors(*values: Any) -> list[Tensor]:
    return [each for each in torch.utils._pytree.tree_leaves(values) if isinstance(each, Tensor)]


@pytest.mark.parametrize(
    "name", ["norm_qkv", "norm_qkv, tokens", "norm_v_", "norm_v_, tokens", "attend_text_, image"]
)
def test_what_is_done_in_chunks_is_that_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def written() -> list[Tensor]:
        values = given(name, "cpu")
        return _tensors(CALLS[name][0](*values), values)

    whole = written()
    monkeypatch.setattr(projection, "CHUNK_TOKENS", 2)
    torch.testing.assert_close(written(), whole)


def test_v_of_some_heads_is_that_of_all() -> None:
    *first, weight, bias = given("norm_qkv", "cpu")
    expected = norm_qkv(*first, weight, bias)[2]
    cut = 2 * HEAD_DIM
    end = 2 * CHANNELS + cut
    v = norm_qkv(*first, weight[:end], bias[:end])[2]
    torch.testing.assert_close(v, expected[..., :cut])
    norm_v_(v, *first, weight[end:], bias[end:])
    torch.testing.assert_close(v[..., : CHANNELS - cut], expected[..., cut:])
