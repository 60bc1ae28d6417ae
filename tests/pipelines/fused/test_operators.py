"""What operators say of themselves holds, on the CPU and on a GPU, and both compute the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pipelines.fused import projection
from pipelines.fused.norms import add_, add_norm, add_norm_, norm
from pipelines.fused.projection import norm_qkv
from pipelines.fused.rotary import norm_rotate_, norm_rotate_apart_, norm_rotate_joined_, rms_norm_

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


def linear() -> tuple[Tensor, Tensor]:
    return noise(3 * CHANNELS, CHANNELS), noise(3 * CHANNELS)


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
    "add_": (add_, lambda: (hidden(), hidden(1), modulation(TOKENS), noise(1, 6, CHANNELS), 5)),
    "norm_rotate_": (
        norm_rotate_,
        lambda: (hidden(), hidden(1), *weights(), *tables(), HEADS, EPS),
    ),
    "norm_rotate_joined_": (
        norm_rotate_joined_,
        lambda: (noise(BATCH, TOKENS, 3 * CHANNELS), *weights(), *tables(), HEADS, EPS),
    ),
    "norm_rotate_apart_": (
        norm_rotate_apart_,
        lambda: (hidden(), noise(BATCH, TOKENS, 2 * CHANNELS), *weights(), *tables(), HEADS, EPS),
    ),
    "rms_norm_": (rms_norm_, lambda: (hidden(), weights()[0], EPS)),
    "norm_qkv": (
        norm_qkv,
        lambda: (hidden(), modulation(1), None, 0, EPS, *linear()),
    ),
    "norm_qkv, tokens": (
        norm_qkv,
        lambda: (hidden(), modulation(TOKENS), noise(1, 6, CHANNELS), 0, EPS, *linear()),
    ),
}


def given(name: str, device: str) -> tuple[Any, ...]:
    return tuple(each.to(device) if isinstance(each, Tensor) else each for each in CALLS[name][1]())


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
    long = tuple(each.cpu().double() if isinstance(each, Tensor) else each for each in given(name, device))
    # What is given back, and what was written to.
    found, expected = (_tensors(operator(*values), values) for values in (short, long))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu().double(), other, rtol=1e-5, atol=1e-5)


def _tensors(*values: Any) -> list[Tensor]:
    return [each for each in torch.utils._pytree.tree_leaves(values) if isinstance(each, Tensor)]


def test_a_product_in_chunks_is_that_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("norm_qkv", "norm_qkv, tokens"):
        whole = norm_qkv(*given(name, "cpu"))
        monkeypatch.setattr(projection, "CHUNK_TOKENS", 2)
        torch.testing.assert_close(norm_qkv(*given(name, "cpu")), whole)
        monkeypatch.undo()
