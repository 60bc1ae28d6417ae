"""Stock Diffusers pipelines against ours at the true architectures, with the same random weights.

    python -m benchmarks.pipeline wan2.1-t2v-1.3b --step-only --json step.json
    python -m benchmarks.pipeline wan2.1-t2v-1.3b --job --steps 20 --json job.json
    python -m benchmarks.pipeline wan2.1-t2v-14b --step-only --layers 8 --variants stock sparse sparse+compile

Every variant (``benchmarks/variants.py`` says what there is) runs in a process of its own. All are built
first and stay; then they are measured in turn, round after round, so that a clock that drifts meets all of
them and shows. Ratios are to the first variant, round by round. ``--in-turn`` starts and ends a process for
each measurement instead, where the GPU cannot hold all the models at once.

A step is one forward pass over one clip, between device events. A job is prompt to MP4, on the wall clock:
real pipelines, text encoder and VAE included, with a tokenizer of made-up words. Weights are random, so the
pictures are noise: this measures time and memory only. With fewer ``--layers`` (steps only) the time of the
rest is not in the numbers. The JSON file is written again after every measurement.
"""

import argparse
import dataclasses
import importlib.util
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from benchmarks.architectures import ARCHITECTURES, Architecture
from benchmarks.pipeline_process import VariantProcess, started
from benchmarks.pipeline_records import Request
from benchmarks.pipeline_report import Report, Row, same_weights
from benchmarks.variants import Variant, read_variant

STEP_VARIANTS = ("stock", "dense", "sparse", "stock+compile", "dense+compile", "sparse+compile")
JOB_VARIANTS = ("stock", "dense", "sparse", "sparse+compile")


def run(requests: Sequence[Request], report: Report, rounds: int, json_path: Path | None) -> None:
    """All rounds, all processes alive; the report fills up as they answer."""
    with started(requests) as processes:
        pairs = list(zip(report.rows, processes, strict=True))
        for row, process in pairs:
            row.take(process.facts())
            _tell(row, "built")
        _warm_up(pairs, together=not report.whole_job)
        _keep(report, json_path)
        for _ in range(rounds):
            for row, process in pairs:
                row.take(process.measure())
                _tell(row, "measured")
                _keep(report, json_path)


def _warm_up(pairs: Sequence[tuple[Row, VariantProcess]], *, together: bool) -> None:
    """Compiling takes long and may go on in all processes at once; jobs might not fit beside each other."""
    for group in [pairs] if together else [[pair] for pair in pairs]:
        for _, process in group:
            process.begin_warm_up()
        for row, process in group:
            row.take(process.facts())
            _tell(row, "warm")


def run_in_turn(requests: Sequence[Request], report: Report, rounds: int, json_path: Path | None) -> None:
    """The same with one process at a time."""
    for _ in range(rounds):
        for row, request in zip(report.rows, requests, strict=True):
            with started([request]) as (process,):
                row.take(process.facts())
                _warm_up([(row, process)], together=True)
                row.take(process.measure())
            _keep(report, json_path)


def _tell(row: Row, done: str) -> None:
    """Progress, for who waits minutes for the table."""
    print(f"{time.strftime('%X')} {row.variant} {row.failure or done}", file=sys.stderr, flush=True)


def _keep(report: Report, json_path: Path | None) -> None:
    if json_path is not None:
        report.write(json_path)


def read_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("architecture", choices=sorted(ARCHITECTURES))
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--step-only", action="store_true", help="forward passes of the transformer alone")
    what.add_argument("--job", action="store_true", help="whole jobs, prompt to MP4")
    parser.add_argument("--variants", nargs="+", metavar="VARIANT", help="the first is compared with")
    parser.add_argument("--rounds", type=_positive, default=3)
    parser.add_argument("--repeats", type=_positive, default=5, help="forward passes of a round")
    parser.add_argument("--steps", type=_positive, default=20, help="denoise steps of a job")
    parser.add_argument(
        "--dense-steps", type=float, default=0.2, help="of sparse jobs, as the server's setting"
    )
    parser.add_argument("--chunks", type=_positive, default=4, help="slices of the feed-forward")
    parser.add_argument("--width", type=_positive)
    parser.add_argument("--height", type=_positive)
    parser.add_argument("--num-frames", type=_positive)
    parser.add_argument("--block-size", type=_positive)
    parser.add_argument("--anchor-stride", type=_positive)
    parser.add_argument("--layers", type=_positive, help="so many layers of the transformer; steps only")
    parser.add_argument("--in-turn", action="store_true", help="one process at a time")
    parser.add_argument("--tiny", action="store_true", help="everything as small as it gets")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the results here")
    found = parser.parse_args(arguments)
    try:
        found.chosen = architecture_of(found)
        found.variants = variants_of(found)
    except ValueError as error:
        parser.error(str(error))
    if found.job and importlib.util.find_spec("imageio_ffmpeg") is None:
        parser.error("--job writes MP4 files and needs imageio-ffmpeg")
    return found


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number


def architecture_of(arguments: argparse.Namespace) -> Architecture:
    """The architecture and clip asked for. Raises ValueError for what cannot be."""
    architecture = ARCHITECTURES[arguments.architecture]
    if arguments.job and architecture.preset is None:
        served = ", ".join(name for name, each in sorted(ARCHITECTURES.items()) if each.preset)
        raise ValueError(
            f"--job: the server does not run {architecture.name}, only {served}; use --step-only"
        )
    if arguments.job and arguments.layers is not None:
        raise ValueError("--layers: a job has all layers")
    if arguments.tiny:
        architecture = architecture.shrunk()
    if arguments.layers is not None:
        architecture = architecture.with_layers(arguments.layers)
    names = ("width", "height", "num_frames", "block_size", "anchor_stride")
    said = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    return checked(dataclasses.replace(architecture, **said))


def checked(architecture: Architecture) -> Architecture:
    """The same. Raises ValueError for a clip that would be cut or rounded."""
    for name, patch in (("height", architecture.patch[1]), ("width", architecture.patch[2])):
        step, value = architecture.vae_spatial * patch, getattr(architecture, name)
        if value % step:
            raise ValueError(f"--{name} {value} must be a multiple of {step}")
    if (architecture.num_frames - 1) % architecture.vae_temporal:
        raise ValueError(
            f"--num-frames {architecture.num_frames} must be 1 and a multiple of {architecture.vae_temporal}"
        )
    return architecture


def variants_of(arguments: argparse.Namespace) -> list[Variant]:
    """The variants asked for. Raises ValueError for unknown ones, and for those that make no sense here."""
    names = arguments.variants or (STEP_VARIANTS if arguments.step_only else JOB_VARIANTS)
    variants = [read_variant(name) for name in names]
    for variant in variants:
        if arguments.step_only and variant.offload != "none":
            raise ValueError(f"{variant}: a single step has no offload level; use --job")
        if arguments.step_only and "vae16" in variant.switches:
            raise ValueError(f"{variant}: a single step has no VAE; use --job")
        if arguments.device == "cpu" and {"cudnn", "scores"} & variant.switches:
            raise ValueError(f"{variant} needs a GPU")
    if len(set(variants)) < len(variants):
        raise ValueError("--variants names one twice")
    return variants


def main(arguments: Sequence[str] | None = None) -> Report:
    """Command line."""
    found = read_arguments(arguments)
    requests = [
        Request(
            architecture=found.chosen,
            variant=variant,
            device=found.device,
            whole_job=found.job,
            repeats=found.repeats,
            steps=found.steps,
            dense_steps=found.dense_steps,
            chunks=found.chunks,
            seed=found.seed,
        )
        for variant in found.variants
    ]
    names = ("width", "height", "num_frames", "block_size", "anchor_stride", "guidance_scale")
    settings: dict[str, object] = {name: getattr(found.chosen, name) for name in names}
    settings |= {
        name: getattr(found, name) for name in ("rounds", "repeats", "steps", "dense_steps", "chunks", "seed")
    }
    settings |= {"in_turn": found.in_turn, "tiny": found.tiny}
    report = Report(found.chosen, found.job, settings, [Row(variant) for variant in found.variants])
    try:
        (run_in_turn if found.in_turn else run)(requests, report, found.rounds, found.json)
    finally:
        print(report.table(), flush=True)
    if not same_weights(report.rows):
        raise SystemExit("the processes had different weights: nothing can be compared")
    if failed := [str(row.variant) for row in report.rows if row.failure]:
        raise SystemExit(f"without all their numbers: {', '.join(failed)}")
    return report


def _stop(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)  # a time limit: what is measured is printed, the processes end
    main()
