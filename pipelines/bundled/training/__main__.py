"""Trains the bundled model: ``python -m pipelines.bundled.training {vae,transformer} OUTPUT --seconds S``.

Several devices: ``python -m torch.distributed.run --nproc_per_node 2 -m pipelines.bundled.training ...``.
The budget is wall-clock and counts from ``--started`` (seconds of the epoch), so that start-up is inside it.
OUTPUT holds what is made: ``vae/``, then the Diffusers folder as ``shapes.tar.*`` (joined by
``cat shapes.tar.* | tar x``), a JSON-lines log and a contact sheet.
"""

import argparse
import copy
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from transformers import UMT5EncoderModel

from pipelines.bundled.training.components import make_pipeline, save_pipeline
from pipelines.bundled.training.evaluate import evaluate
from pipelines.bundled.training.plans import FULL, SMALL, Plan
from pipelines.bundled.training.ranks import Clock, Ranks
from pipelines.bundled.training.records import RunLog, pack
from pipelines.bundled.training.train_transformer import Bucket, Denoiser, new_denoiser, train_transformer
from pipelines.bundled.training.train_vae import train_vae

LOG_NAME = "log.jsonl"
FOLDER_NAME = "shapes"


def main(argv: Sequence[str] | None = None) -> None:
    """Run one stage; ``argv`` as on the command line."""
    arguments = _parser().parse_args(argv)
    if arguments.device == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
    ranks = Ranks.start(arguments.device)
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    log = RunLog(output / f"{arguments.stage}-{LOG_NAME}" if ranks.is_first else None, arguments.started)
    log.write(
        "start", torch=torch.__version__, arguments={k: str(v) for k, v in sorted(vars(arguments).items())}
    )
    clock = Clock(ranks, arguments.started)
    stage = _run_vae if arguments.stage == "vae" else _run_transformer
    stage(arguments, ranks, clock, log, SMALL if arguments.small else FULL)
    log.write("end")
    ranks.stop()


def _run_vae(arguments: argparse.Namespace, ranks: Ranks, clock: Clock, log: RunLog, plan: Plan) -> None:
    until = arguments.seconds - plan.vae_reserve_seconds
    vae = train_vae(ranks, clock, log, until=until, seed=arguments.seed, plan=plan.vae)
    if ranks.is_first:
        vae.save_pretrained(arguments.output / "vae")


def _run_transformer(
    arguments: argparse.Namespace, ranks: Ranks, clock: Clock, log: RunLog, plan: Plan
) -> None:
    chosen = replace(plan.transformer, **_overrides(arguments))
    if arguments.largest_share is not None:
        chosen = replace(chosen, buckets=_with_largest(chosen.buckets, arguments.largest_share))
    vae = AutoencoderKLWan.from_pretrained(arguments.vae)
    denoiser = _load(arguments.resume) if arguments.resume else new_denoiser(chosen, arguments.seed)
    denoiser = train_transformer(
        ranks,
        clock,
        log,
        until=arguments.seconds - plan.reserve_seconds,
        seed=arguments.seed,
        plan=chosen,
        vae=vae,
        denoiser=denoiser,
    )
    if ranks.is_first:
        _save(denoiser, vae, arguments.output)
        log.write("saved")
    pipeline = make_pipeline(denoiser.text_encoder, vae, denoiser.transformer)
    evaluate(
        pipeline,
        ranks,
        clock,
        log,
        until=arguments.seconds,
        sheet=arguments.output / "sheet.png",
        settings=plan.settings,
        prompts=plan.prompts,
        batch=plan.sample_batch,
    )


def _load(folder: Path) -> Denoiser:
    """Text encoder and transformer of a saved folder, in float32, to be trained further."""
    text_encoder = UMT5EncoderModel.from_pretrained(folder / "text_encoder", dtype=torch.float32)
    transformer = WanTransformer3DModel.from_pretrained(folder / "transformer", dtype=torch.float32)
    return Denoiser(text_encoder.train(), transformer.train()).requires_grad_(True)


def _save(denoiser: Denoiser, vae: AutoencoderKLWan, output: Path) -> None:
    """Write the Diffusers folder in half precision, as an archive in parts."""
    text_encoder, transformer, half_vae = (
        copy.deepcopy(module).cpu().half() for module in (denoiser.text_encoder, denoiser.transformer, vae)
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / FOLDER_NAME
        save_pipeline(make_pipeline(text_encoder, half_vae, transformer), folder)
        pack(folder, output)


def _with_largest(buckets: tuple[Bucket, ...], share: float) -> tuple[Bucket, ...]:
    """The first size gets this share of the time and the steps; the others keep their proportions."""
    rest = (1 - share) / sum(bucket.share for bucket in buckets[1:])
    return (
        replace(buckets[0], share=share),
        *(replace(bucket, share=bucket.share * rest) for bucket in buckets[1:]),
    )


def _overrides(arguments: argparse.Namespace) -> dict[str, Any]:
    names = (
        "encode_seconds",
        "distill_seconds",
        "batch",
        "learning_rate",
        "guidance",
        "sparse_share",
        "time_shift",
    )
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pipelines.bundled.training", description=__doc__)
    parser.add_argument("stage", choices=("vae", "transformer"))
    parser.add_argument("output", type=Path)
    parser.add_argument("--seconds", type=float, required=True, help="wall-clock budget of the whole stage")
    parser.add_argument("--started", type=float, default=time.time(), help="when the budget began")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="tiny sizes, for trying the script")
    parser.add_argument("--vae", type=Path, help="folder of the trained VAE (stage transformer)")
    parser.add_argument("--resume", type=Path, help="saved Diffusers folder to train further")
    parser.add_argument("--encode-seconds", type=float)
    parser.add_argument("--distill-seconds", type=float)
    parser.add_argument("--batch", type=int, help="clips a step on one device")
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--guidance", type=float, help="scale that is distilled into one pass")
    parser.add_argument("--largest-share", type=float, help="share of steps at the largest clip size")
    parser.add_argument("--time-shift", type=float, help="weight of the noisiest times; 5 is the sampler's")
    parser.add_argument("--sparse-share", type=float, help="share of steps under sparse attention")
    return parser


if __name__ == "__main__":
    main()
