"""Rows of a batch that do not know of each other: real text encoders, and what calls of blocks look like."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipelines.rows_apart import rows_apart
from tests.pipelines.text_encoders import KINDS, VOCABULARY, text_encoder

TOKENS = 24


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(params=KINDS)
def encoder(request: pytest.FixtureRequest) -> Any:
    """Random weights."""
    return text_encoder(request.param)


def texts(*lengths: int) -> tuple[Tensor, Tensor]:
    """Token ids and mask [texts, TOKENS]."""
    ids = torch.randint(1, VOCABULARY, (len(lengths), TOKENS), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(TOKENS) < torch.tensor(lengths)[:, None]).long()
    return ids * mask, mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [(5,), (1, TOKENS), (TOKENS, TOKENS), (7, 1, TOKENS, 20)])
def test_a_text_becomes_what_it_is_alone_to_the_bit(
    encoder: Any, lengths: tuple[int, ...], dtype: torch.dtype
) -> None:
    encoder.to(dtype)
    ids, mask = texts(*lengths)
    alone = [encoder(ids[row : row + 1], mask[row : row + 1])[0] for row in range(len(lengths))]
    blocks = list(encoder.encoder.block)
    rows = []
    hooks = [
        block.register_forward_pre_hook(lambda module, args: rows.append(len(args[0]))) for block in blocks
    ]
    with rows_apart(blocks):
        together = encoder(ids, mask)[0]
    for hook in hooks:
        hook.remove()
    assert torch.equal(together, torch.cat(alone))
    assert rows == [len(lengths)] * len(blocks)  # one call of each from outside, with its hooks
    assert all("forward" not in vars(block) for block in blocks)


class Block(nn.Module):
    """Answers with what ``answer`` makes of its arguments."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self._answer = answer

    def forward(self, x: Tensor, *args: Any, **named: Any) -> Any:
        self.calls.append((x, *args, named))
        return self._answer(x)


def test_what_has_a_row_for_each_is_taken_apart_and_the_rest_goes_along() -> None:
    block = Block(lambda x: (x, None, (x + 1,)))
    x, mask, bias = torch.tensor([[1.0], [2.0]]), torch.tensor([[3], [4]]), torch.zeros(1, 5)
    scalar, pair = torch.tensor(7), (torch.tensor([[8], [9]]), None)
    with rows_apart([block]):
        found = block(x, mask, None, bias, scale=2, scalar=scalar, pair=pair)
    assert torch.equal(found[0], x)
    assert found[1] is None
    assert torch.equal(found[2][0], x + 1)
    assert len(block.calls) == 2
    for row, (of_x, of_mask, none, of_bias, named) in enumerate(block.calls):
        assert torch.equal(of_x, x[row : row + 1])
        assert torch.equal(of_mask, mask[row : row + 1])
        assert none is None
        assert of_bias is bias
        assert named["scale"] == 2
        assert named["scalar"] is scalar
        assert torch.equal(named["pair"][0], pair[0][row : row + 1])
        assert named["pair"][1] is None


def test_a_single_row_goes_through_as_it_is() -> None:
    block, x = Block(lambda x: {"any": x}), torch.ones(1, 3)
    with rows_apart([block]):
        assert block(x)["any"] is x


def test_a_result_of_another_kind_is_refused() -> None:
    block = Block(lambda x: {"any": x})
    with rows_apart([block]), pytest.raises(TypeError, match="a block made a dict"):
        block(torch.ones(2, 3))
