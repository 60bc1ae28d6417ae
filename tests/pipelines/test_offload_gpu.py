"""Offload levels and slices on a GPU, with a Wan of middling size and random weights.

Run by hand on a GPU host: ``pytest -m gpu tests/pipelines/test_offload_gpu.py -s``, which prints what it saw.
"""

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from configs.compute import EAGER, ComputeSettings
from configs.fit import predict
from configs.job import JobCancelledError, JobParameters, JobPaths, JobResult
from configs.memory import OFFLOAD_LEVELS, MemoryOptions, OffloadLevel
from configs.resolve import GenerationRequest, resolve
from pipelines import LoadedPipeline, encode_ahead, load_pipeline, run_job
from pipelines.device_memory import limit_memory
from pipelines.fitting import clip_shape
from pipelines.weights import Network
from tests.middling_wan import write_middling_wan
from tests.pipelines.clips import decoded_frames
from tests.pipelines.jobs import CancelAt, finished
from tests.tiny_wan import tiny_preset

pytestmark = pytest.mark.gpu

MIB = 2**20
CUBLAS_BYTES = 64 * MIB  # work space that cuBLAS keeps on a Hopper, 32 MiB for each of two threads
DEVICE = torch.device("cuda", 0)
# 8,640 tokens: two slices of the feed-forward.
CLIP = {"size": "384x640", "num_frames": 33, "num_inference_steps": 3, "guidance_scale": 2.0, "seed": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 900 MB of weights in bfloat16."""
    return write_middling_wan(tmp_path_factory.mktemp("models") / "middling")


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedPipeline:
    """On the GPU, all of it."""
    preset = tiny_preset(folder)
    limits = preset.limits.model_copy(update={"max_side": 1024})
    preset = preset.model_copy(update={"limits": limits})
    return load_pipeline(preset, device="cuda:0", memory=MemoryOptions("none"), compute=EAGER)


@pytest.fixture(autouse=True)
def _all_memory() -> Iterator[None]:
    torch.cuda.empty_cache()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, 0)


def parameters(loaded: LoadedPipeline, **fields: object) -> JobParameters:
    """The clip, resolved."""
    request = GenerationRequest.model_validate({"prompt": "a red circle"} | CLIP | fields)
    return resolve(request, loaded.preset, loaded.preset.attention)


def at_level(loaded: LoadedPipeline, level: OffloadLevel) -> LoadedPipeline:
    """The same weights, at that level."""
    leveled = dataclasses.replace(loaded, memory_options=MemoryOptions(level))
    vars(leveled)["placement"] = loaded.placement  # a placement of its own would not know where they are
    return leveled


def make(loaded: LoadedPipeline, path: Path, **fields: object) -> JobResult:
    """Run the clip's job, with nothing encoded before."""
    loaded.texts.clear()
    result, _ = finished(loaded, parameters(loaded, **fields), path)
    return result


@pytest.mark.parametrize("level", OFFLOAD_LEVELS)
def test_each_level_makes_the_same_frames_in_the_memory_that_is_predicted(
    loaded: LoadedPipeline, tmp_path: Path, level: OffloadLevel
) -> None:
    make(at_level(loaded, "none"), tmp_path / "expected.mp4")
    leveled = at_level(loaded, level)
    result = make(leveled, tmp_path / "clip.mp4")
    again = make(leveled, tmp_path / "again.mp4")
    assert result.memory is not None
    assert result.memory.offload == level
    expected = decoded_frames(tmp_path / "expected.mp4", 640, 384)
    for name in ("clip.mp4", "again.mp4"):
        assert (decoded_frames(tmp_path / name, 640, 384) == expected).all()
    clip = clip_shape(leveled, parameters(leveled))
    predicted = predict(loaded.memory, clip, level, "whole").peaks
    for stage, peak in predicted.items():
        measured = again.metrics.peak_memory_by_stage[stage]
        print(f"{level} {stage}: {measured / MIB:.0f} MiB, predicted {peak / MIB:.0f} MiB")
        assert measured < 1.3 * peak + 64 * MIB
    print(f"{level}: {again.metrics.total_seconds:.2f} s")


def test_lower_levels_take_less_and_rest_with_nothing(loaded: LoadedPipeline, tmp_path: Path) -> None:
    peaks, idle = [], []
    for level in OFFLOAD_LEVELS:
        peaks.append(make(at_level(loaded, level), tmp_path / f"{level}.mp4").metrics.peak_memory_by_stage)
        torch.cuda.synchronize()
        idle.append(torch.cuda.memory_allocated(0))
    print(list(zip(OFFLOAD_LEVELS, peaks, idle, strict=True)))
    denoise = [peak["denoise"] for peak in peaks]
    assert denoise[1] < denoise[0] - 0.9 * loaded.memory.text_encoder.total
    assert denoise[2] < denoise[1] + 16 * MIB
    assert denoise[3] < denoise[2] - 0.4 * loaded.memory.transformers[0].blocks
    assert idle[0] - idle[1] == pytest.approx(loaded.memory.text_encoder.total, rel=0.05)
    assert idle[2] < CUBLAS_BYTES + 16 * MIB
    assert idle[3] < CUBLAS_BYTES + 16 * MIB
    loaded.placement.set_level("none")


def test_memory_chooses_the_level(loaded: LoadedPipeline, tmp_path: Path) -> None:
    """A real limit on torch's allocator: the job must run within it, at the level that fits."""
    seen = []
    for more in (4096, 0):
        clip = clip_shape(loaded, parameters(loaded))
        need = predict(loaded.memory, clip, "group", "small_tiles").peak_bytes
        limit = need + 640 * MIB + more * MIB
        loaded.placement.set_level("none")
        auto = dataclasses.replace(loaded, memory_options=MemoryOptions(limit_bytes=limit))
        vars(auto)["placement"] = loaded.placement
        loaded.placement.set_level("group")
        torch.cuda.empty_cache()
        limit_memory(DEVICE, limit)
        result = make(auto, tmp_path / "clip.mp4")
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
        assert result.memory is not None
        seen.append(result.memory.offload)
        assert result.metrics.peak_memory_bytes <= limit
        print(f"limit {limit / MIB:.0f} MiB: {result.memory}, {result.decode}, {result.metrics}")
    assert seen[0] == "none"
    assert seen[1] != "none"
    loaded.placement.set_level("none")


def test_a_text_is_encoded_ahead_while_blocks_stream(loaded: LoadedPipeline, tmp_path: Path) -> None:
    """Two networks stream at once, from two threads, into the same job's memory."""
    leveled = at_level(loaded, "group")
    make(leveled, tmp_path / "expected.mp4")
    leveled.texts.clear()
    others = [parameters(leveled, prompt=f"number {i}") for i in range(4)]

    def encode_others() -> None:
        for other in others:
            encode_ahead(leveled, other)

    thread = threading.Thread(target=encode_others)
    started = threading.Event()

    def start() -> bool:
        if not started.is_set() and len(leveled.texts) >= 2:
            started.set()
            thread.start()
        return False

    list(run_job(leveled, parameters(leveled), JobPaths(tmp_path / "clip.mp4"), is_cancelled=start))
    thread.join()
    frames = [decoded_frames(tmp_path / name, 640, 384) for name in ("expected.mp4", "clip.mp4")]
    assert (frames[0] == frames[1]).all()
    loaded.placement.set_level("none")


def test_a_cancel_in_a_streamed_pass_frees_everything(loaded: LoadedPipeline, tmp_path: Path) -> None:
    leveled = at_level(loaded, "group")
    make(leveled, tmp_path / "expected.mp4")
    torch.cuda.synchronize()
    idle = torch.cuda.memory_allocated(0)
    with pytest.raises(JobCancelledError):
        list(run_job(leveled, parameters(leveled), JobPaths(tmp_path / "x.mp4"), is_cancelled=CancelAt(9)))
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated(0) == idle
    make(leveled, tmp_path / "clip.mp4")
    frames = [decoded_frames(tmp_path / name, 640, 384) for name in ("expected.mp4", "clip.mp4")]
    assert (frames[0] == frames[1]).all()
    loaded.placement.set_level("none")


def test_copies_overlap_with_the_computation() -> None:
    """Blocks that take longer to compute than to come: streamed costs little more than resident."""
    before = torch.cuda.memory_allocated(0)
    blocks = torch.nn.ModuleList(torch.nn.Linear(4096, 4096, bias=False) for _ in range(12))
    model = torch.nn.Sequential(*blocks).to(DEVICE, torch.bfloat16).eval()
    x = torch.randn(262_144, 4096, device=DEVICE, dtype=torch.bfloat16)
    network = Network(model, list(blocks), DEVICE)

    def seconds() -> float:
        with torch.no_grad():
            model(x)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(3):
                expected.copy_(model(x))
            end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    expected = torch.empty_like(x)
    resident = seconds()
    first = expected.clone()
    network.leave()
    with network.streamed():
        streamed = seconds()
        left = torch.cuda.memory_allocated(0) - before - 3 * x.nbytes
    print(f"resident {resident:.3f} s, streamed {streamed:.3f} s")
    assert torch.equal(expected, first)
    assert left < 5 * 4096 * 4096 * 2 + CUBLAS_BYTES


@pytest.mark.parametrize("chunks", [2, 4, 8])
def test_slices_take_less_memory(loaded: LoadedPipeline, tmp_path: Path, chunks: int) -> None:
    runs = {}
    for count in (1, chunks):
        sliced = dataclasses.replace(loaded, memory_options=MemoryOptions("none", count))
        vars(sliced)["placement"] = loaded.placement
        make(sliced, tmp_path / "warm.mp4")
        runs[count] = make(sliced, tmp_path / f"{count}.mp4")
        assert runs[count].memory is not None
    for count, result in runs.items():
        steps, peaks = result.metrics.step_seconds, result.metrics.peak_memory_by_stage
        print(f"{count} slices: {steps}, denoise {peaks['denoise'] / MIB:.0f} MiB")
    peaks_of = {count: result.metrics.peak_memory_by_stage["denoise"] for count, result in runs.items()}
    assert peaks_of[chunks] <= peaks_of[1]


def test_compiled_blocks_stream(loaded: LoadedPipeline, tmp_path: Path) -> None:
    compute = ComputeSettings(compile="on")
    compiled = load_pipeline(loaded.preset, device="cuda:0", memory=MemoryOptions("none"), compute=compute)
    for level in ("none", "group", "none"):
        result = make(at_level(compiled, level), tmp_path / f"{level}.mp4")
        assert result.compute is not None
        assert result.compute.compiled
        print(f"compiled, {level}: {result.metrics}")
    frames = [decoded_frames(tmp_path / f"{level}.mp4", 640, 384) for level in ("none", "group")]
    assert (frames[0] == frames[1]).all()
