"""Compiled blocks and fp8 layers on a GPU, on the bundled model."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._dynamo
from safetensors import safe_open
from torch._dynamo.utils import counters
from torch.nn.functional import cosine_similarity

from configs.compute import EAGER, ComputeReport, ComputeSettings
from configs.job import JobFinished, JobPaths
from configs.model_preset import BUNDLED_MODEL, find_model
from configs.resolve import GenerationRequest, resolve
from pipelines import LoadedPipeline, load_pipeline, run_job, warm_up

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Inductor itself uses what PyTorch deprecates.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
PRESET = find_model(BUNDLED_MODEL)


@pytest.fixture(autouse=True)
def _own_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def loaded(compute: ComputeSettings) -> LoadedPipeline:
    return load_pipeline(PRESET, device="cuda", dtype="bfloat16", compute=compute)


def made(pipeline: LoadedPipeline, size: str, folder: Path) -> tuple[torch.Tensor, ComputeReport]:
    """Latents after three guided steps, two of them sparse, and how they were computed."""
    request = GenerationRequest(
        prompt="a red circle moving left quickly on a white background",
        size=size,
        num_inference_steps=3,
        guidance_scale=3.0,
        seed=1,
    )
    attention = PRESET.attention.model_copy(update={"dense_steps": 1, "min_tokens": 0})
    paths = JobPaths(folder / "clip.mp4", checkpoint=folder / f"{size}.safetensors")
    events = list(run_job(pipeline, resolve(request, PRESET, attention), paths, is_cancelled=lambda: False))
    last = events[-1]
    assert isinstance(last, JobFinished)
    assert last.result.compute is not None
    with safe_open(folder / f"{size}.safetensors", framework="pt") as file:
        latents: torch.Tensor = file.get_tensor("latents").double().flatten()
    (folder / f"{size}.safetensors").unlink()
    return latents, last.result.compute


def test_compiled_jobs_share_graphs_and_make_the_same_latents(tmp_path: Path) -> None:
    sizes = ("128x128", "128x96", "256x256")
    eager = loaded(EAGER)
    truth = [made(eager, size, tmp_path)[0] for size in sizes]
    compiled = loaded(ComputeSettings(compile="on"))
    warm_up(compiled, PRESET.attention)
    for size, latents in zip(sizes, truth, strict=True):
        ours, report = made(compiled, size, tmp_path)
        assert report.compiled
        # Largest of these clips: 9 x 32 x 32 tokens, above what is batched, and enough for slices.
        assert report.guidance == ("separate" if size == "256x256" else "batched")
        assert cosine_similarity(ours, latents, dim=0) >= 0.999
    assert counters["stats"]["unique_graphs"] == 2  # both passes in a batch; one, in slices
    assert not counters["graph_break"]


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs fp8"
)
@pytest.mark.parametrize("mode", ["off", "on"])
def test_fp8_layers_stay_near_full_precision(mode: str, tmp_path: Path) -> None:
    truth, _ = made(loaded(EAGER), "128x128", tmp_path)
    compute = ComputeSettings.model_validate({"compile": mode, "precision": "fp8"})
    ours, report = made(loaded(compute), "128x128", tmp_path)
    assert (report.precision, report.compiled) == ("fp8", mode == "on")
    # A pass differed by 0.0135 of its norm, a cosine of 0.9999, where fp8 was computed on a CPU.
    assert cosine_similarity(ours, truth, dim=0) >= 0.995
    assert not torch.equal(ours, truth)
