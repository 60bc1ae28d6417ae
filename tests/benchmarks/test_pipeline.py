"""benchmarks/pipeline.py in its tiny form: real processes, real jobs, and what is made of their numbers."""

import json
import multiprocessing
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import pipeline
from benchmarks.architectures import (
    COGVIDEOX_5B,
    HUNYUAN_VIDEO,
    WAN_2_1_1_3B,
    WAN_2_1_14B,
    WAN_2_2_5B,
    Architecture,
)
from benchmarks.pipeline_process import VariantProcess, bench_of, serve
from benchmarks.pipeline_records import Facts, Failure, JobSeconds, Request, Round
from benchmarks.pipeline_report import Report, Row, same_weights
from benchmarks.variants import read_variant

TINY = WAN_2_1_1_3B.shrunk()
# The others differ from the first one in size only.
KINDS = (WAN_2_1_1_3B, WAN_2_2_5B, COGVIDEOX_5B, HUNYUAN_VIDEO)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors on a shared machine: more threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def request_of(architecture: Architecture, variant: str, *, whole_job: bool = False) -> Request:
    return Request(
        architecture=architecture,
        variant=read_variant(variant),
        device="cpu",
        whole_job=whole_job,
        repeats=2,
        steps=3,
        dense_steps=1,
    )


def test_a_run_compares_processes_and_writes_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = tmp_path / "step.json"
    rest = ["--step-only", "--tiny", "--device", "cpu", "--rounds", "2", "--json", str(path)]
    report = pipeline.main(["wan2.1-t2v-1.3b", "--variants", "stock", "sparse", *rest])
    stock, sparse = report.rows
    assert (stock.failure, sparse.failure) == (None, None)
    assert [len(row.rounds) for row in report.rows] == [2, 2]
    assert sparse.difference(stock) == pytest.approx(8e-4, rel=0.5)  # another attention, the same weights
    printed = capsys.readouterr().out
    assert "2 of 30 layers, 64x64, 9 frames, 48 tokens" in printed
    assert "16, 5, full, density 0.582, 24 sparse and 0 dense calls" in printed

    content = json.loads(path.read_text())
    first, second = content["rows"]
    assert first["fingerprints"] == second["fingerprints"]
    assert first["variant"] == "stock"
    assert first["time_ratio"] == first["peak_ratio"] == 1
    assert second["peak_bytes"] > second["weight_bytes"]["transformer"] > 0
    assert content["machine"]["torch"] == torch.__version__
    assert content["targets"] == []  # those are for the published clips


@pytest.mark.parametrize("architecture", KINDS, ids=lambda each: str(each.name))
def test_every_kind_of_transformer_makes_a_step_like_stock(architecture: Architecture) -> None:
    tiny = architecture.shrunk()
    rounds = {name: bench_of(request_of(tiny, name)).measure() for name in ("stock", "dense", "sparse")}
    stock, dense, sparse = (torch.tensor(found.output) for found in rounds.values())
    assert stock.std() > 0.1
    torch.testing.assert_close(dense, stock, rtol=1e-5, atol=1e-5)
    assert not torch.equal(sparse, stock)
    assert "sparse and 0 dense calls" in rounds["sparse"].ran
    assert all(len(found.step_seconds) == 2 for found in rounds.values())


@pytest.mark.parametrize(
    ("architecture", "variant", "ran"),
    [
        (WAN_2_1_1_3B, "stock", "dense, PyTorch's choice"),
        (WAN_2_1_1_3B, "dense", "sdpa, density 1.000; 0 sparse and 12 dense calls"),
        (WAN_2_2_5B, "sparse", "torch, density 0.582; 8 sparse and 4 dense calls"),
    ],
    ids=["stock", "dense", "sparse with a timestep for each token"],
)
def test_a_whole_job_is_measured_stage_by_stage(architecture: Architecture, variant: str, ran: str) -> None:
    found = bench_of(request_of(architecture.shrunk(), variant, whole_job=True)).measure()
    job = found.job
    assert job is not None
    stages = (job.text_encode, job.denoise, job.vae_decode, job.encode_mp4)
    assert min(stages) > 0
    assert sum(stages) <= job.total * 1.001
    assert len(found.step_seconds) == 3
    assert sum(found.step_seconds) <= job.denoise
    assert found.ran.startswith(ran)
    assert {"text_encode", "denoise", "vae_decode"} <= found.peak_bytes.keys()


def test_a_variant_that_cannot_run_says_why() -> None:
    ours, theirs = multiprocessing.Pipe()
    serve(theirs, replace(request_of(TINY, "stock"), device="nowhere"))
    answer = ours.recv()
    assert isinstance(answer, Failure)
    assert "nowhere" in answer.reason


def test_a_process_that_dies_is_a_failure_and_not_a_wait() -> None:
    process = VariantProcess(request_of(TINY, "stock"))
    process._process.kill()
    assert process.facts() == process.measure() == Failure("its process ended with exit code -9")
    process.end()


def row(variant: str, *seconds: float, peak: int = 100, failure: str | None = None) -> Row:
    rounds = [Round(step_seconds=(each,), peak_bytes={"denoise": peak}, ran="") for each in seconds]
    return Row(read_variant(variant), None, rounds, failure)


def test_time_is_compared_round_by_round() -> None:
    slowing, ours = row("stock", 1.0, 2.0, 4.0), row("dense", 0.5, 1.0, 2.0)
    assert ours.against(slowing, "time") == 0.5
    assert ours.against(row("stock"), "time") is None
    assert row("dense", 1.0, peak=60).against(slowing, "peak") == pytest.approx(0.6)


def test_a_job_is_compared_by_all_of_its_time() -> None:
    job = JobSeconds(10.0, 1.0, 6.0, 2.0, 1.0)
    found = Round(step_seconds=(2.0, 4.0), peak_bytes={"denoise": 1, "vae_decode": 3}, ran="", job=job)
    whole = Row(read_variant("stock"), None, [found])
    assert (whole.seconds, whole.step_spread[1], whole.peak_bytes) == (10.0, 3.0, 3)


def test_targets_are_for_the_published_clip_and_the_layers_that_they_name() -> None:
    rows = [row("stock", 1.0), row("sparse", 9.0), row("sparse+compile", 0.32, peak=63)]
    report = Report(WAN_2_1_14B.with_layers(8), False, {}, rows)
    assert [(each.target.measure, each.met) for each in report.outcomes()] == [
        ("time", True),
        ("peak", False),
    ]
    assert "| sparse+compile | stock | peak | 0.630 | 0.62 | missed |" in report.table()
    for other in (WAN_2_1_14B, replace(WAN_2_1_14B.with_layers(8), width=832)):
        assert Report(other, False, {}, rows).outcomes() == []


def test_failures_stand_below_the_table() -> None:
    report = Report(TINY, False, {}, [row("stock", 1.0), row("sparse", failure="out of memory")])
    assert report.table().endswith("sparse failed: out of memory")
    assert [each["failure"] for each in report.content()["rows"]] == [None, "out of memory"]  # type: ignore[attr-defined]


def test_different_weights_are_noticed() -> None:
    rows = [row("stock", 1.0), row("dense", 1.0), row("sparse")]
    rows[0].facts, rows[1].facts = Facts({}, {"transformer": 1}, {}), Facts({}, {"transformer": 1}, {})
    assert same_weights(rows)
    rows[1].facts = Facts({}, {"transformer": 2}, {})
    assert not same_weights(rows)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("ours", "begins with 'ours'; it must be stock, dense or sparse"),
        ("stock+fp8", "stock has no 'fp8'; it has compile, cudnn, scores, model"),
        ("sparse+compile+compile", "names a switch twice"),
        ("sparse+group+encoder", "may have only one of encoder, model, group"),
    ],
    ids=["no such kind", "not of stock", "twice", "two levels"],
)
def test_variants_that_make_no_sense(name: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem.replace("+", r"\+")):
        read_variant(name)


def test_a_variant_is_written_as_it_is_read() -> None:
    assert str(read_variant("sparse+encoder+fp8+compile")) == "sparse+compile+fp8+encoder"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            "cogvideox-5b --job",
            "the server does not run cogvideox-5b, only wan2.1-t2v-1.3b, wan2.1-t2v-14b, ",
        ),
        ("wan2.1-t2v-14b --job --layers 8", "--layers: a job has all layers"),
        ("wan2.1-t2v-14b --step-only --width 840", "--width 840 must be a multiple of 16"),
        ("wan2.1-t2v-14b --step-only --num-frames 80", "--num-frames 80 must be 1 and a multiple of 4"),
        (
            "wan2.1-t2v-14b --step-only --variants sparse+model",
            "a single step has no offload level; use --job",
        ),
        ("wan2.1-t2v-14b --step-only --variants sparse+vae16", "a single step has no VAE; use --job"),
        ("article-7b --step-only --device cpu --variants stock+scores", "stock+scores needs a GPU"),
        ("article-7b --step-only --rounds 0", "0 is below 1"),
        ("article-7b --step-only --variants stock stock", "--variants names one twice"),
    ],
    ids=[
        "not served",
        "job with fewer layers",
        "width",
        "frames",
        "level of a step",
        "VAE of a step",
        "GPU",
        "rounds",
        "twice",
    ],
)
def test_arguments_that_cannot_be(arguments: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        pipeline.read_arguments(arguments.split())
    assert problem in capsys.readouterr().err
