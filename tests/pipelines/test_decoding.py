"""The decode ladder: which rung decodes, what it costs in looks, and what is left behind."""

import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.hooks import RemovableHandle

from configs.compute import ComputeSettings, VaeDtype
from configs.job import DecodeReport, DecodeRung, JobCancelledError, JobFailedError, JobParameters
from configs.model_preset import BUNDLED_MODEL, find_model
from pipelines import LoadedPipeline, load_pipeline
from pipelines.bundled.drawing import render
from pipelines.bundled.world import trained_specs
from pipelines.convolution import convolved_by_onednn
from pipelines.decoding import SMALL_TILE, TILE, decode, rungs
from pipelines.frames import Frames, Leaving
from pipelines.wan import TILING
from tests.pipelines.address_space import address_space_limit
from tests.pipelines.jobs import bytes_of_tensors, finished

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
MEBIBYTE = 2**20
FUSED = ComputeSettings(compile="off", fused="on")
RUNGS: tuple[DecodeRung, ...] = ("whole", "small_tiles")
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB."


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def large(params: JobParameters) -> JobParameters:
    """A clip of more than one tile a side."""
    return params.model_copy(update={"width": 512, "height": 512, "num_frames": 5})


def _latents(params: JobParameters) -> torch.Tensor:
    shape = (1, 4, (params.num_frames + 3) // 4, params.height // 8, params.width // 8)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _decode(
    loaded: LoadedPipeline, params: JobParameters, first: DecodeRung = "whole"
) -> tuple[Frames, DecodeReport]:
    return decode(loaded, params, _latents(params), lambda: None, first)


def _exhausted_above(loaded: LoadedPipeline, latent_pixels: int) -> RemovableHandle:
    """Let the VAE's decoder run out of memory for more latent pixels than that at once."""

    def before_call(module: object, inputs: tuple[torch.Tensor, ...]) -> None:
        if inputs[0].shape[-2] * inputs[0].shape[-1] > latent_pixels:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)

    handle: RemovableHandle = loaded.pipe.vae.decoder.register_forward_pre_hook(before_call)
    return handle


def _tiling(loaded: LoadedPipeline) -> list[object]:
    return [getattr(loaded.pipe.vae, name) for name in TILING]


@pytest.mark.parametrize(
    ("device", "side", "names"),
    [
        (CPU, 64, ["whole"]),
        (CPU, 128, ["whole"]),
        (CPU, 256, ["whole", "small_tiles"]),
        (CPU, 272, ["whole", "tiled", "small_tiles"]),
        (CUDA, 64, ["whole", "cpu"]),
        (CUDA, 1280, ["whole", "tiled", "small_tiles", "cpu"]),
    ],
)
def test_no_rung_repeats_another(device: torch.device, side: int, names: list[str]) -> None:
    for width, height in ((side, 16), (16, side)):
        ladder = rungs(device, width, height)
        assert [rung.name for rung in ladder] == names
        assert [rung.device for rung in ladder] == [CPU if name == "cpu" else device for name in names]
    assert TILE.side > SMALL_TILE.side


def test_enough_memory_is_one_whole_decode(loaded: LoadedPipeline, params: JobParameters) -> None:
    frames, report = _decode(loaded, params)
    assert report == DecodeReport(rung="whole")
    with convolved_by_onednn(CPU):
        whole = Leaving(loaded.family.decode_latents(loaded.pipe, _latents(params))).frames()
    assert np.array_equal(frames, whole)


def test_a_cpu_convolves_by_onednn_only(loaded: LoadedPipeline, params: JobParameters) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as ran:
        _decode(loaded, params)
    names = {each.key for each in ran.key_averages()}
    assert "aten::mkldnn_convolution" in names
    assert "aten::slow_conv3d_forward" not in names


def test_an_allocator_that_refuses_the_whole_picture(loaded: LoadedPipeline, params: JobParameters) -> None:
    """Torch's own allocator, held down by the operating system: the whole takes over 900 MiB."""
    expected, _ = _decode(loaded, params)
    huge = params.model_copy(update={"width": 1536, "height": 1536, "num_frames": 1})
    tiling, held = _tiling(loaded), bytes_of_tensors()
    with address_space_limit(400 * MEBIBYTE):
        frames, found = _decode(loaded, huge)
    # What a tile gets depends on what the process had freed before; the whole picture never fits.
    assert found in (
        DecodeReport(rung="tiled", failed=("whole",)),
        DecodeReport(rung="small_tiles", failed=("whole", "tiled")),
    )
    assert frames.shape == (1, 1536, 1536, 3)
    assert _tiling(loaded) == tiling
    assert bytes_of_tensors() == held
    again, found = _decode(loaded, params)
    assert found == DecodeReport(rung="whole")
    assert np.array_equal(again, expected)


@pytest.mark.parametrize(
    ("latent_pixels", "rung"), [(32 * 32, "tiled"), (16 * 16, "small_tiles")], ids=["tiled", "small_tiles"]
)
def test_a_job_that_ran_out_of_memory_in_the_decode_still_makes_its_clip(
    own_pipeline: LoadedPipeline, params: JobParameters, tmp_path: Path, latent_pixels: int, rung: DecodeRung
) -> None:
    job = params.model_copy(update={"width": 320, "height": 272, "num_frames": 1})
    expected, _ = finished(own_pipeline, params, tmp_path / "expected.mp4")
    whole, _ = finished(own_pipeline, job, tmp_path / "whole.mp4")
    assert whole.decode == DecodeReport(rung="whole")
    held = bytes_of_tensors()
    hook = _exhausted_above(own_pipeline, latent_pixels)
    result, _ = finished(own_pipeline, job, tmp_path / "clip.mp4")
    hook.remove()
    assert result.decode is not None
    assert result.decode.rung == rung
    assert result.decode.failed == (("whole",) if rung == "tiled" else ("whole", "tiled"))
    assert bytes_of_tensors() == held
    after, _ = finished(own_pipeline, params, tmp_path / "after.mp4")
    assert after.decode == DecodeReport(rung="whole")
    assert after.file == expected.file


def test_memory_that_is_enough_for_no_rung(own_pipeline: LoadedPipeline, large: JobParameters) -> None:
    tiling, held = _tiling(own_pipeline), bytes_of_tensors()
    hook = _exhausted_above(own_pipeline, 0)
    with pytest.raises(JobFailedError) as caught:
        _decode(own_pipeline, large)
    hook.remove()
    code, message = caught.value.code, caught.value.message
    del caught  # it still has its traceback here
    assert (code, message) == (
        "out_of_memory",
        "out of memory in vae_decode for 5 frames of 512x512 on cpu, however it was decoded "
        f"(whole: {OUT_OF_MEMORY}; tiled: {OUT_OF_MEMORY}; small_tiles: {OUT_OF_MEMORY})",
    )
    assert _tiling(own_pipeline) == tiling
    assert bytes_of_tensors() == held


def test_other_errors_are_not_tried_again(own_pipeline: LoadedPipeline, large: JobParameters) -> None:
    calls: list[int] = []

    def broken(module: object, inputs: object) -> None:
        calls.append(1)
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    own_pipeline.pipe.vae.decoder.register_forward_pre_hook(broken)
    with pytest.raises(RuntimeError, match="mat1"):
        _decode(own_pipeline, large)
    assert calls == [1]


def test_cancel_before_a_frame_is_rounded(loaded: LoadedPipeline, params: JobParameters) -> None:
    def cancelled() -> None:
        raise JobCancelledError

    with pytest.raises(JobCancelledError):
        decode(loaded, params, _latents(params), cancelled)


def test_tiles_differ_from_the_whole_picture_less_than_the_vae_from_what_it_was_given() -> None:
    """By mean square error, of a picture of the bundled model, whose VAE is trained."""
    loaded = load_pipeline(find_model(BUNDLED_MODEL), device="cpu", dtype="float32")
    vae = loaded.pipe.vae
    clip = render(trained_specs()[5:6], torch.Generator().manual_seed(0), height=320, width=320, num_frames=1)
    mean, std = (
        torch.tensor(statistics).view(1, -1, 1, 1, 1)
        for statistics in (vae.config.latents_mean, vae.config.latents_std)
    )
    latents = (vae.encode(clip).latent_dist.mode() - mean) / std
    given = (clip[0].transpose(0, 1) + 1) / 2
    whole = loaded.family.decode_latents(loaded.pipe, latents)
    own_error = float((whole - given).square().mean())
    errors = []
    for tile in (TILE, SMALL_TILE):
        with loaded.family.tiled(loaded.pipe, tile):
            tiled = loaded.family.decode_latents(loaded.pipe, latents)
        errors.append(float((tiled - whole).square().mean()))
    assert 0 < errors[0] < errors[1] < own_error


def test_every_rung_decodes_fused(loaded: LoadedPipeline, params: JobParameters) -> None:
    large = params.model_copy(update={"width": 160, "height": 144, "num_frames": 9})
    fused = load_pipeline(loaded.preset, device="cpu", dtype="float32", compute=FUSED)
    for rung in RUNGS:
        expected, report = _decode(loaded, large, rung)
        assert report == DecodeReport(rung=rung)
        frames, report = _decode(fused, large, rung)
        assert report == DecodeReport(rung=rung, fused=True)
        assert np.abs(frames.astype(int) - expected).max() <= 1  # where it is rounded to the other side


@pytest.mark.parametrize(("vae_dtype", "is_told"), [("float16", True), ("bfloat16", False)])
def test_what_float16_cannot_hold_says_what_can(
    loaded: LoadedPipeline, params: JobParameters, vae_dtype: VaeDtype, is_told: bool
) -> None:
    compute = ComputeSettings(vae_dtype=vae_dtype)
    short = load_pipeline(loaded.preset, device="cpu", dtype="float32", compute=compute)
    _decode(short, params)
    convolution = short.pipe.vae.decoder.up_blocks[-1].resnets[-1].conv2
    convolution.weight.data *= 1e6 if is_told else float("nan")
    with pytest.raises(JobFailedError) as caught:
        _decode(short, params)
    assert caught.value.code == "bad_output"
    assert ("float16 ends at 65504, vae_dtype=float32 has the range" in caught.value.message) == is_told


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_last_rung_is_the_cpu(loaded: LoadedPipeline, large: JobParameters) -> None:
    on_gpu = load_pipeline(loaded.preset, device="cuda", dtype="float32")

    def exhausted(module: object, inputs: tuple[torch.Tensor, ...]) -> None:
        if inputs[0].device.type == "cuda":
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)

    hook = on_gpu.pipe.vae.decoder.register_forward_pre_hook(exhausted)
    gc.collect()  # the pipelines of earlier tests
    held = torch.cuda.memory_allocated()
    frames, report = _decode(on_gpu, large)
    hook.remove()
    assert report == DecodeReport(rung="cpu", failed=("whole", "tiled", "small_tiles"), fused=True)
    assert torch.cuda.memory_allocated() == held
    assert {weight.device.type for weight in on_gpu.pipe.vae.parameters()} == {"cuda"}
    fused = load_pipeline(loaded.preset, device="cpu", dtype="float32", compute=FUSED)
    with fused.family.tiled(fused.pipe, SMALL_TILE), convolved_by_onednn(CPU):
        on_cpu = Leaving(fused.family.decode_latents(fused.pipe, _latents(large))).frames()
    assert np.array_equal(frames, on_cpu)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_with_little_memory_decodes_in_tiles(loaded: LoadedPipeline, params: JobParameters) -> None:
    """A real limit on the device's allocator, between what a whole picture and what a tile needs."""
    on_gpu = load_pipeline(loaded.preset, device="cuda", dtype="float32")
    huge = params.model_copy(update={"width": 2048, "height": 2048, "num_frames": 5})
    peaks = []
    for tile in (None, TILE):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        with on_gpu.family.tiled(on_gpu.pipe, tile):
            on_gpu.family.decode_latents(on_gpu.pipe, _latents(huge))
        on_gpu.family.forget(on_gpu.pipe)
        peaks.append(torch.cuda.max_memory_reserved())
    assert peaks[1] < peaks[0]
    gc.collect()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(sum(peaks) / 2 / total)
    try:
        _, report = _decode(on_gpu, huge)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert report == DecodeReport(rung="tiled", failed=("whole",), fused=True)
    assert torch.cuda.memory_allocated() == held
