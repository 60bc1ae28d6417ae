"""Guidance in one batch, step caches, and what a job tells of them."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch._dynamo

from configs.attention import AttentionConfig
from configs.compute import ComputeSettings, StepCache
from configs.job import JobFailedError, JobParameters
from configs.model_preset import ModelPreset
from pipelines import LoadedPipeline, load_pipeline, warm_up
from pipelines.attending import swapped
from pipelines.cancel import CancelFlag
from pipelines.compiling import NOT_ON_A_CPU
from pipelines.computing import Computing
from pipelines.denoise import StepWatch, denoise
from pipelines.guidance import BATCH_MOST_TOKENS, batches_guidance
from pipelines.step_cache import CONFIGS
from pipelines.text import encode_text
from tests.pipelines.jobs import finished
from tests.pipelines.stock import stock_output

LAYERS = 2
# So many that two neighbouring ones are alike, which first_block waits for.
STEPS = 40


# Inductor itself uses what PyTorch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def computed(loaded: LoadedPipeline, params: JobParameters) -> tuple[torch.Tensor, Computing, int]:
    """Latents, how they were computed, and calls of self-attention."""
    computing = Computing(loaded, params)
    with torch.no_grad(), swapped(loaded, params) as handle:
        watch = StepWatch(loaded.device, params, handle, CancelFlag(lambda: False), lambda event: None)
        text = encode_text(loaded, params)
        with computing.within(text):
            latents = denoise(loaded, params, text, watch)
        ran = handle.report()
    return latents, computing, ran.sparse_calls + ran.dense_calls


@pytest.fixture(scope="module")
def batching(preset: ModelPreset) -> LoadedPipeline:
    """Runs guidance in one batch."""
    compute = ComputeSettings(guidance_batching="on")
    return load_pipeline(preset, device="cpu", dtype="float32", compute=compute)


@pytest.fixture
def guided(params: JobParameters) -> JobParameters:
    """The same with guidance."""
    return params.model_copy(update={"guidance_scale": 4.0, "negative_prompt": "a black square"})


def test_guidance_in_one_batch_makes_the_same_latents(
    loaded: LoadedPipeline, batching: LoadedPipeline, guided: JobParameters
) -> None:
    apart, of_apart, calls_apart = computed(loaded, guided)
    together, of_together, calls_together = computed(batching, guided)
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)
    assert (of_apart.report().guidance, of_together.report().guidance) == ("separate", "batched")
    assert calls_apart == 2 * calls_together == 2 * LAYERS * guided.num_inference_steps


def test_without_guidance_nothing_is_batched(batching: LoadedPipeline, params: JobParameters) -> None:
    _, computing, calls = computed(batching, params)
    assert computing.report().guidance == "none"
    assert calls == LAYERS * params.num_inference_steps


def test_dense_latents_after_20_steps_are_the_stock_pipelines(
    batching: LoadedPipeline, guided: JobParameters
) -> None:
    dense = {"attention": AttentionConfig(backend="dense"), "num_inference_steps": 20}
    params = guided.model_copy(update=dense)
    latents, _, _ = computed(batching, params)
    torch.testing.assert_close(latents, stock_output(batching, params, "latent"), rtol=1e-4, atol=1e-4)


def test_short_clips_are_batched_on_a_gpu_only() -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert batches_guidance("auto", BATCH_MOST_TOKENS, gpu)
    assert not batches_guidance("auto", BATCH_MOST_TOKENS + 1, gpu)
    assert not batches_guidance("auto", 1, cpu)
    assert batches_guidance("on", 10**6, cpu)
    assert not batches_guidance("off", 1, gpu)


@pytest.mark.parametrize("name", sorted(CONFIGS))
@pytest.mark.parametrize("backend", ["anchor_local", "dense"])
def test_a_step_cache_answers_passes_and_leaves_nothing(
    loaded: LoadedPipeline, params: JobParameters, name: StepCache, backend: str
) -> None:
    attention = params.attention if backend != "dense" else AttentionConfig(backend="dense")
    plain = params.model_copy(update={"attention": attention, "num_inference_steps": STEPS})
    cached = plain.model_copy(update={"step_cache": name})
    exact, _, all_calls = computed(loaded, plain)
    first, computing, calls = computed(loaded, cached)
    report = computing.report()
    assert (report.step_cache, report.passes) == (name, STEPS)
    assert 0 < report.cached_passes < STEPS
    assert calls < all_calls
    assert not torch.equal(first, exact)
    # A later job starts with an empty cache, and one without a cache has none.
    torch.testing.assert_close(computed(loaded, cached)[0], first, rtol=0, atol=0)
    torch.testing.assert_close(computed(loaded, plain)[0], exact, rtol=0, atol=0)


def test_without_a_step_cache_every_pass_is_computed(loaded: LoadedPipeline, guided: JobParameters) -> None:
    report = computed(loaded, guided)[1].report()
    assert (report.passes, report.cached_passes) == (2 * guided.num_inference_steps, 0)


def test_a_cache_that_began_anew_is_told(loaded: LoadedPipeline, params: JobParameters) -> None:
    cached = Computing(loaded, params.model_copy(update={"step_cache": "first_block"})).warnings
    assert cached(0) == []
    assert cached(2) == [
        "step_cache first_block began anew at step 3, where this attempt went on: "
        "the clip may differ a little from one that was made without a break"
    ]
    assert Computing(loaded, params).warnings(2) == []


def test_a_job_tells_how_it_was_computed(
    batching: LoadedPipeline, guided: JobParameters, tmp_path: Path
) -> None:
    params = guided.model_copy(update={"num_inference_steps": STEPS, "step_cache": "taylor_seer"})
    result, _ = finished(batching, params, tmp_path / "clip.mp4")
    assert result.compute is not None
    assert result.environment is not None
    assert (result.environment.compiled, result.environment.precision) == (False, "full")
    assert (result.compute.compiled, result.compute.eager_reason) == (False, NOT_ON_A_CPU)
    assert (result.compute.guidance, result.compute.step_cache) == ("batched", "taylor_seer")
    assert 0 < result.compute.cached_passes < result.compute.passes == 2 * STEPS
    assert result.warnings == ()


@pytest.fixture
def cannot_compile(monkeypatch: pytest.MonkeyPatch, preset: ModelPreset) -> Iterator[LoadedPipeline]:
    """Is to compile, and cannot, as on a machine without gcc."""

    def no_compiler(graph: object, inputs: object) -> object:
        raise OSError("no gcc")

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=no_compiler))
    compute = ComputeSettings(compile="on")
    yield load_pipeline(preset, device="cpu", dtype="float32", compute=compute)
    torch._dynamo.reset()


def test_a_job_that_fell_back_to_eager_warns(
    cannot_compile: LoadedPipeline, params: JobParameters, tmp_path: Path
) -> None:
    cannot_compile.blocks.is_required = False  # as with auto on a GPU
    result, _ = finished(cannot_compile, params, tmp_path / "clip.mp4")
    assert result.compute is not None
    assert result.environment is not None
    assert not result.compute.compiled
    assert not result.environment.compiled
    assert "no gcc" in str(result.compute.eager_reason)
    assert result.warnings == (f"the transformer ran eager, which is slower: {result.compute.eager_reason}",)


def test_a_model_that_must_compile_and_cannot_does_not_load(
    cannot_compile: LoadedPipeline, preset: ModelPreset
) -> None:
    with pytest.raises(JobFailedError, match=r"compile=on, but compilation failed: .*no gcc") as caught:
        warm_up(cannot_compile, preset.attention)
    assert caught.value.code == "model_load_failed"


def test_without_compilation_there_is_nothing_to_warm_up(loaded: LoadedPipeline, preset: ModelPreset) -> None:
    encoded = len(loaded.texts)
    warm_up(loaded, preset.attention)
    assert len(loaded.texts) == encoded
