"""Compiled blocks: one graph for all of them and all lengths, what is told, and what a failure does."""

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters
from torch.testing import assert_close

from attention import swap
from pipelines.compiling import MOST_GRAPHS, NOT_ON_A_CPU, CompileFailedError, RepeatedBlocks
from pipelines.feed_forward import sliced_feed_forward
from pipelines.fp8 import to_fp8
from pipelines.fused.wan import fuse_blocks
from pipelines.joined_attention import join_projections
from pipelines.output_norm import sliced_output_norm
from pipelines.step_cache import step_cached
from tests.tiny_wan import LATENT_CHANNELS, TEXT_DIM, tiny_transformer

CPU = torch.device("cpu")
# Inductor itself uses what PyTorch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _own_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def one_pass(transformer: Any, frames: int, side: int, batch: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(frames * side)
    with torch.no_grad():
        out: torch.Tensor = transformer(
            hidden_states=torch.randn(batch, LATENT_CHANNELS, frames, side, side, generator=generator),
            timestep=torch.full((batch,), 500.0),
            encoder_hidden_states=torch.randn(batch, 8, TEXT_DIM, generator=generator),
            return_dict=False,
        )[0]
    return out


def anchor_local(transformer: Any) -> Any:
    return swap(transformer, "anchor_local", block_size=8, anchor_stride=3)


def test_one_graph_serves_all_blocks_lengths_jobs_and_dense_steps() -> None:
    transformer = tiny_transformer()
    shapes = ((3, 8), (3, 4), (5, 8))
    with anchor_local(transformer):
        eager = [one_pass(transformer, *shape) for shape in shapes]
    blocks = RepeatedBlocks(transformer.blocks, CPU, "on")
    with anchor_local(transformer):
        compiled = [one_pass(transformer, *shape) for shape in shapes]
    with anchor_local(transformer) as again:  # a later job
        again.set_dense("dense_steps")
        one_pass(transformer, 3, 8)
        again.set_dense(None)
        compiled.append(one_pass(transformer, 3, 8))
        assert again.report().sparse_calls == again.report().dense_calls == len(transformer.blocks)
    assert blocks.are_compiled
    for ours, truth in zip(compiled, [*eager, eager[0]], strict=True):
        assert_close(ours, truth, rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("fused", [False, True])
def test_a_first_pass_that_is_dense_has_no_graph_of_its_own(
    fused: bool, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rotary tables are views, those of a sparse pass are not."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    transformer = tiny_transformer()
    assert fuse_blocks(transformer) if fused else True
    RepeatedBlocks(transformer.blocks, CPU, "on")
    with anchor_local(transformer) as handle:
        handle.set_dense("dense_steps")
        one_pass(transformer, 3, 8, batch)
        handle.set_dense(None)
        one_pass(transformer, 3, 8, batch)
        assert handle.report().sparse_calls == handle.report().dense_calls
    assert counters["stats"]["unique_graphs"] == 1


def test_the_stride_of_a_batch_of_one_has_no_graph_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patches from cuDNN have one that others have not."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    transformer = tiny_transformer()

    def as_cudnn(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        out = out.contiguous(memory_format=torch.channels_last_3d)
        return out.as_strided(out.shape, (out.shape[1], *out.stride()[1:]))

    transformer.patch_embedding.register_forward_hook(as_cudnn)
    RepeatedBlocks(transformer.blocks, CPU, "on")
    with anchor_local(transformer) as handle:
        handle.set_dense("dense_steps")  # which leaves tokens where they are
        one_pass(transformer, 3, 8)
    assert counters["stats"]["unique_graphs"] == 1


def test_slices_caches_and_later_jobs_add_one_graph_each_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    # What is compiled, and when, is decided before the backend, which takes long.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    transformer = tiny_transformer()
    blocks = RepeatedBlocks(transformer.blocks, CPU, "on")

    def graphs_after_a_job(chunks: int, batch: int = 1) -> int:
        with anchor_local(transformer), sliced_feed_forward([transformer], chunks):
            one_pass(transformer, 3, 8, batch)
            one_pass(transformer, 3, 4, batch)
        return int(counters["stats"]["unique_graphs"])

    assert [graphs_after_a_job(chunks) for chunks in (1, 2, 2, 1)] == [1, 2, 2, 2]
    assert graphs_after_a_job(1, batch=2) == 3
    cached = step_cached([transformer], [transformer.blocks[-1]], "first_block")
    whole = sliced_feed_forward([transformer], 1)  # as in every job
    with cached, whole, transformer.cache_context("cond"), anchor_local(transformer):
        one_pass(transformer, 3, 8)
    assert graphs_after_a_job(1) == 3
    assert blocks.are_compiled


def test_joined_projections_compile_once_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    transformer = tiny_transformer()
    shapes = ((3, 8), (3, 4), (5, 8))
    with anchor_local(transformer):
        eager = [one_pass(transformer, *shape) for shape in shapes]
    assert join_projections(transformer)
    blocks = RepeatedBlocks(transformer.blocks, CPU, "on")
    with anchor_local(transformer), sliced_feed_forward([transformer], 3), sliced_output_norm([transformer]):
        compiled = [one_pass(transformer, *shape) for shape in shapes]
    for ours, truth in zip(compiled, eager, strict=True):
        assert_close(ours, truth, rtol=1e-4, atol=1e-5)
    assert blocks.are_compiled
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_auto_runs_eager_on_a_cpu_and_says_why() -> None:
    transformer = tiny_transformer()
    blocks = RepeatedBlocks(transformer.blocks, CPU, "auto")
    assert (blocks.are_compiled, blocks.eager_reason) == (False, NOT_ON_A_CPU)
    assert all("forward" not in vars(block) for block in transformer.blocks)


class Block(nn.Module):
    """Something that compiles quickly."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2


@pytest.fixture
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without gcc."""

    def no_compiler(graph: object, inputs: object) -> object:
        raise OSError("no gcc")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=no_compiler))


@pytest.mark.usefixtures("_no_compiler")
def test_without_a_compiler_the_blocks_run_eager_and_say_why() -> None:
    block, x = Block(), torch.randn(3, 4)
    blocks = RepeatedBlocks([block], torch.device("cuda"), "auto")  # there, auto compiles
    assert blocks.are_compiled
    assert torch.equal(block(x), x.sin() * 2)
    assert (blocks.are_compiled, blocks.have_failed) == (False, True)
    assert "no gcc" in str(blocks.eager_reason)


@pytest.mark.usefixtures("_no_compiler")
def test_compile_on_fails_loudly_without_a_compiler() -> None:
    block = Block()
    RepeatedBlocks([block], CPU, "on")
    with pytest.raises(CompileFailedError, match=r"compile=on, but compilation failed: .*no gcc"):
        block(torch.randn(3, 4))


def test_the_limits_hold_in_the_thread_that_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def looking(graph: Any, inputs: object) -> Any:
        seen.append(torch._dynamo.config.recompile_limit)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=looking))
    block = Block()
    RepeatedBlocks([block], CPU, "on")
    thread = threading.Thread(target=block, args=(torch.randn(3, 4),))
    thread.start()
    thread.join()
    assert seen == [MOST_GRAPHS]


def test_an_error_of_the_block_itself_is_no_failure_to_compile() -> None:
    block = Block()
    blocks = RepeatedBlocks([block], CPU, "on")
    with pytest.raises(TypeError):
        block()
    assert blocks.are_compiled


def test_fp8_layers_compile_once_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    transformer = tiny_transformer().bfloat16()
    join_projections(transformer)
    to_fp8(transformer.blocks)
    block = transformer.blocks[0]

    def ran(tokens: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(tokens)
        hidden, text = (torch.randn(1, n, 64, generator=generator).bfloat16() for n in (tokens, 8))
        tables = tuple(torch.randn(1, tokens, 1, 16, generator=generator) for _ in range(2))
        out: torch.Tensor = block(hidden, text, torch.zeros(1, 6, 64), tables)
        return out

    with torch.no_grad(), sliced_feed_forward([transformer], 3):
        eager = [ran(tokens) for tokens in (48, 40)]
        RepeatedBlocks(transformer.blocks, CPU, "on")
        compiled = [ran(tokens) for tokens in (48, 40)]
    for ours, truth in zip(compiled, eager, strict=True):
        assert (ours.float() - truth.float()).norm() < 0.02 * truth.float().norm()
    assert counters["stats"]["unique_graphs"] == 1
