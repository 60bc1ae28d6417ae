"""precision="fp8" against the definition in float64, and where it is refused."""

import pytest
import torch
from torch import Tensor

from attention import AnchorLocalBackend, AnchorLocalPattern, anchor_local_attention, swap
from attention.anchor_local.fp8_impl import anchor_local_fp8
from attention.choice import check_precision
from attention.layout import anchor_local_layout
from attention.triton_tiles import TileConfig
from tests.attention.anchor_local.helpers import CASES, DEVICE, Case, exact, inputs, relative_error
from tests.attention.tiny_transformer import tiny_transformer

# Rounding normal numbers to 8 bits: 2.6e-2 each for weights and values in e4m3, about 1e-2 each for q and k
# in int8 (root of the mean square); together 3.9e-2. Few terms scatter about that.
ERROR = 4e-2


def _attention(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return anchor_local_attention(
        q,
        k,
        v,
        block_size=case.block_size,
        anchor_stride=case.anchor_stride,
        anchor_offset=case.anchor_offset,
        impl="triton",
        precision="fp8",
    )


# The other cases only differ in what the kernels share.
@pytest.mark.parametrize("case", [CASES[i] for i in (0, 1, 3, 4, 5, 6)], ids=str)
def test_error_against_the_definition(case: Case) -> None:
    q, k, v = inputs(case, torch.bfloat16, DEVICE)
    out = _attention(case, q, k, v)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert relative_error(out, exact(case, q, k, v)) < ERROR


def test_small_tiles_walk_whole_tiles_and_rests() -> None:
    """Both ranges have several whole tiles and a rest; outputs begin as NaN."""
    case = Case(150, 60, 4, anchor_offset=1, batch=2, heads=2, kv_heads=1)
    q, k, v = inputs(case, torch.float32, DEVICE)
    layout = anchor_local_layout(case.pattern, case.tokens, q.device)
    truth = exact(case, q, k, v)
    q, k, v = (x[:, layout.key_order] for x in (q, k, v))
    out = torch.full_like(q, float("nan"))
    anchor_local_fp8(q, k, v, layout, case.head_dim**-0.5, TileConfig(32, 16, 4, 2), out)
    assert relative_error(out[:, layout.query_inverse], truth) < ERROR


def test_a_number_added_to_all_keys_changes_nothing() -> None:
    """Keys are quantised without their mean, which would take most of the 8 bits here."""
    case = Case(130, 50, 6)
    q, k, v = inputs(case, torch.float32, DEVICE)
    moved = k + 50 * torch.randn(case.head_dim, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    assert relative_error(_attention(case, q, moved, v), exact(case, q, k, v)) < ERROR


def test_a_chunk_of_queries_is_those_rows() -> None:
    case = Case(140, 60, 16, anchor_offset=5)
    q, k, v = inputs(case, torch.bfloat16, DEVICE)
    whole = _attention(case, q, k, v)
    chunk = anchor_local_attention(
        q[:, 37:100],
        k,
        v,
        block_size=60,
        anchor_stride=16,
        anchor_offset=5,
        q_start=37,
        impl="triton",
        precision="fp8",
    )
    torch.testing.assert_close(chunk, whole[:, 37:100])


def test_a_cpu_refuses_it() -> None:
    q = torch.randn(1, 8, 1, 16)
    with pytest.raises(ValueError, match=r"precision='fp8' needs a GPU, got device cpu"):
        anchor_local_attention(q, q, q, block_size=4, anchor_stride=2, precision="fp8")
    with pytest.raises(ValueError, match=r"cannot run with impl='torch'"):
        anchor_local_attention(q, q, q, block_size=4, anchor_stride=2, precision="fp8", impl="torch")


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> torch.device:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: request.param)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    return torch.device("cuda")


@pytest.mark.parametrize("a_gpu", [(8, 0), (8, 6)], indirect=True)
def test_gpus_without_float8_refuse_it(a_gpu: torch.device) -> None:
    with pytest.raises(ValueError, match=r"precision='fp8' needs .* a GPU has 8\.[06]; take"):
        check_precision("fp8", "auto", a_gpu)
    check_precision("full", "auto", a_gpu)


@pytest.mark.parametrize("a_gpu", [(8, 9), (9, 0)], indirect=True)
def test_gpus_with_float8_take_it(a_gpu: torch.device) -> None:
    check_precision("fp8", "auto", a_gpu)


def test_an_unknown_precision_lists_the_known_ones() -> None:
    q = torch.randn(1, 8, 1, 16)
    with pytest.raises(ValueError, match="precision must be one of full, fp8, got 'int4'"):
        anchor_local_attention(q, q, q, block_size=4, anchor_stride=2, precision="int4")  # type: ignore[arg-type]


def test_a_swap_says_what_it_runs_with() -> None:
    backend = AnchorLocalBackend(AnchorLocalPattern(6, 5), "triton", precision="fp8")
    assert backend.settings.precision == "fp8"
    assert backend.at_step(3).settings.precision == "fp8"
    with pytest.raises(ValueError, match="cannot run with impl='torch'"):
        AnchorLocalBackend(AnchorLocalPattern(6, 5), "torch", precision="fp8")
    transformer = tiny_transformer()
    with swap(transformer, block_size=6, anchor_stride=5) as handle:
        assert handle.report().precision == "full"
    with swap(transformer, block_size=6, anchor_stride=5, impl="triton", precision="fp8") as handle:
        assert handle.report().precision == "fp8"
    with pytest.raises(ValueError, match="window takes no precision"):
        swap(transformer, "window", window=1, precision="fp8")
