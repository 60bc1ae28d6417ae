"""Offload levels on a CPU, where host and device are one: what comes and goes, and that jobs do not notice.

What a GPU adds (streams, pinned memory, memory that is really freed): test_offload_gpu.py.
"""

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from configs.job import JobCancelledError, JobParameters, JobPaths
from configs.memory import OFFLOAD_LEVELS, MemoryOptions, OffloadLevel
from pipelines import LoadedPipeline, encode_ahead, load_pipeline, run_job
from pipelines.placement import Placement
from pipelines.weights import Movable, Network
from tests.pipelines.clips import decoded_frames
from tests.pipelines.jobs import IN_SECOND_STEP, IN_TEXT, CancelAt, bytes_of_tensors, finished, hook_count
from tests.pipelines.text_encoders import KINDS, text_encoder
from tests.tiny_wan import tiny_preset, write_tiny_wan

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


class Traced(Movable):
    """Remembers whether it is on the device."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__(tensors, CPU)
        self.is_here = True

    def leave(self) -> None:
        super().leave()
        self.is_here = False

    def enter(self) -> None:
        super().enter()
        self.is_here = True


class Blocks(nn.Module):
    """Blocks that say which of them are on the device while one runs."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def traced_network(count: int) -> tuple[Network, list[Traced]]:
    """A network whose blocks are traced."""
    network = Network(module := Blocks(count), list(module.blocks), CPU)
    traced = [Traced(list(block.parameters())) for block in module.blocks]
    network._blocks = list(traced)
    network.leave()
    return network, traced


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_at_most_three_blocks_are_there_and_the_one_that_runs_is(count: int) -> None:
    network, traced = traced_network(count)
    seen: list[tuple[bool, int]] = []
    for index, block in enumerate(network.module.blocks):  # type: ignore[arg-type]

        def look(module: nn.Module, args: object, index: int = index) -> None:
            seen.append((traced[index].is_here, sum(block.is_here for block in traced)))

        with network.streamed():
            pass
        block.register_forward_hook(lambda module, args, output, look=look: look(module, args))
    x = torch.ones(1, 2)
    expected = network.module(x)
    seen.clear()
    with network.streamed():
        for _ in range(3):
            assert torch.equal(network.module(x), expected)
    assert len(seen) == 3 * count
    assert all(is_here for is_here, _ in seen)
    assert max(number for _, number in seen) == min(3, count)
    assert not any(block.is_here for block in traced)
    assert all(not block._forward_pre_hooks for block in network.module.blocks)  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_of_embeddings_stays_on_the_host_while_blocks_come(kind: str) -> None:
    encoder, ids = text_encoder(kind), torch.arange(12).view(2, 6)
    network = Network(encoder, list(encoder.encoder.block), CPU)
    expected, table = encoder(ids)[0], encoder.shared.weight.clone()
    assert list(network._rows) == [encoder.shared.weight]  # also known as embed_tokens
    with network.streamed():
        assert encoder.shared.weight.shape == (0,)
        assert torch.equal(encoder(ids)[0], expected)
        assert torch.equal(encoder(ids)[0], expected)
    assert torch.equal(encoder.shared.weight, table)
    assert torch.equal(encoder.encoder.embed_tokens.weight, table)
    for go in (network.enter, network.leave, network.stay):
        go()
        assert torch.equal(encoder(ids)[0], expected)
    with pytest.raises(JobCancelledError), network.streamed():
        raise JobCancelledError
    assert torch.equal(encoder(ids)[0], expected)


def test_embeddings_that_are_more_than_a_table_come_along() -> None:
    module = nn.ModuleDict({"normed": nn.Embedding(4, 2, max_norm=1.0), "block": nn.Embedding(4, 2)})
    network = Network(module, [module["block"]], CPU)
    assert network._rows == {}


def test_a_pass_that_breaks_off_leaves_nothing_behind() -> None:
    network, traced = traced_network(5)

    def break_off(module: nn.Module, args: object) -> None:
        raise JobCancelledError

    handle = network.module.blocks[3].register_forward_pre_hook(break_off)  # type: ignore[index,union-attr]
    with pytest.raises(JobCancelledError), network.streamed():
        network.module(torch.ones(1, 2))
    handle.remove()
    assert not any(block.is_here for block in traced)
    with network.streamed():
        network.module(torch.ones(1, 2))


def at_level(loaded: LoadedPipeline, level: OffloadLevel) -> LoadedPipeline:
    """The pipeline with that level asked for; a server on a CPU would refuse all but ``none``."""
    return dataclasses.replace(loaded, memory_options=MemoryOptions(level))


@pytest.mark.parametrize("level", OFFLOAD_LEVELS)
def test_every_level_makes_the_same_clip(
    own_pipeline: LoadedPipeline, params: JobParameters, tmp_path: Path, level: OffloadLevel
) -> None:
    params = params.model_copy(update={"guidance_scale": 3.0})
    expected, _ = finished(own_pipeline, params, tmp_path / "expected.mp4")
    leveled = at_level(own_pipeline, level)
    own_pipeline.texts.clear()
    hooks, held = hook_count(leveled), bytes_of_tensors()
    result, _ = finished(leveled, params, tmp_path / "clip.mp4")
    assert result.memory is not None
    assert (result.memory.offload, result.memory.lowered_from) == (level, None)
    # The manifest names the level, so files differ; frames do not.
    assert (result.file.sha256 == expected.file.sha256) == (level == "none")
    assert _frames(tmp_path / "clip.mp4") == _frames(tmp_path / "expected.mp4")
    assert (hook_count(leveled), bytes_of_tensors()) == (hooks, held)


def _frames(path: Path) -> bytes:
    return decoded_frames(path, 64, 64).tobytes()


@pytest.mark.parametrize("call", [IN_TEXT, IN_SECOND_STEP], ids=["text", "denoise"])
def test_a_cancelled_job_at_the_lowest_level_leaves_no_trace(
    own_pipeline: LoadedPipeline, params: JobParameters, tmp_path: Path, call: int
) -> None:
    leveled = at_level(own_pipeline, "group")
    expected, _ = finished(leveled, params, tmp_path / "expected.mp4")
    own_pipeline.texts.clear()
    hooks, held = hook_count(leveled), bytes_of_tensors()
    with pytest.raises(JobCancelledError):
        list(run_job(leveled, params, JobPaths(tmp_path / "clip.mp4"), is_cancelled=CancelAt(call)))
    assert (hook_count(leveled), bytes_of_tensors()) == (hooks, held)
    again, _ = finished(leveled, params, tmp_path / "clip.mp4")
    assert again.file == expected.file


@pytest.mark.parametrize("level", ["model", "group"])
def test_two_transformers_take_turns(tmp_path: Path, params: JobParameters, level: OffloadLevel) -> None:
    folder = write_tiny_wan(tmp_path / "two", two_transformers=True)
    two = load_pipeline(tiny_preset(folder), device="cpu", dtype="float32")
    finished(two, params, tmp_path / "expected.mp4")
    finished(at_level(two, level), params, tmp_path / "clip.mp4")
    assert _frames(tmp_path / "clip.mp4") == _frames(tmp_path / "expected.mp4")


def test_one_of_two_transformers_is_there(own_pipeline: LoadedPipeline) -> None:
    modules = {"transformer": nn.Linear(2, 2), "transformer_2": nn.Linear(2, 2)}
    placement = Placement.of(modules, {"transformer": "", "transformer_2": ""}, CPU)
    traced = {name: Traced(list(module.parameters())) for name, module in modules.items()}
    for name, network in placement._networks.items():
        network._rest = traced[name]
    placement.set_level("model")
    with placement.denoising():
        assert [each.is_here for each in traced.values()] == [True, False]
        modules["transformer_2"](torch.ones(1, 2))
        assert [each.is_here for each in traced.values()] == [False, True]
    assert [each.is_here for each in traced.values()] == [False, False]


def test_no_text_is_encoded_ahead_without_room(own_pipeline: LoadedPipeline, params: JobParameters) -> None:
    placement = own_pipeline.placement
    placement.set_level("encoder", may_encode_ahead=False)
    encode_ahead(own_pipeline, params)
    assert len(own_pipeline.texts) == 0
    placement.set_level("encoder", may_encode_ahead=True)
    encode_ahead(own_pipeline, params)
    assert len(own_pipeline.texts) == 1
    placement.stop_encoding_ahead()
    encode_ahead(own_pipeline, params.model_copy(update={"prompt": "another"}))
    assert len(own_pipeline.texts) == 1
    placement.set_level("none")
    placement.stop_encoding_ahead()  # all networks are there anyway
    encode_ahead(own_pipeline, params.model_copy(update={"prompt": "another"}))
    assert len(own_pipeline.texts) == 2


def test_a_level_is_not_changed_while_a_text_is_encoded(own_pipeline: LoadedPipeline) -> None:
    placement, changed = own_pipeline.placement, threading.Event()

    def change() -> None:
        placement.set_level("encoder")
        changed.set()

    with placement.encoding(ahead=True):
        thread = threading.Thread(target=change)
        thread.start()
        assert not changed.wait(0.2)
    thread.join(60)
    assert changed.is_set()
    assert placement.level == "encoder"


def test_weights_that_come_back_for_good_need_no_host_copy() -> None:
    tensor = torch.ones(4)
    movable = Movable([tensor], CPU)
    movable.leave()
    on_host = [movable._host is not None]
    movable.stay()
    on_host.append(movable._host is not None)
    assert on_host == [True, False]
    assert torch.equal(tensor, torch.ones(4))
