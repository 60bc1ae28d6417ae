"""How well clips of the bundled model follow their prompts, with dense and with sparse attention.

    python -m benchmarks.prompt_following --clips clips --json prompt_following.json
    python -m benchmarks.prompt_following --attention dense window --json prompt_following_window.json

Held-out prompts (never trained on) go through the serving path: request, job, MP4. What the MP4 shows is read
back from its decoded frames. Clip n has seed n, with every attention. An interrupted run goes on from the
clips in ``--clips``.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

from benchmarks.clips import make_clip, read_frames, weights_sha256
from benchmarks.following_report import (
    BLOCK_TOPK,
    DEFAULT,
    DENSE,
    SHEET_CLIPS,
    WINDOW,
    Run,
    Seen,
    as_json,
    print_report,
    sheet_clips,
)
from benchmarks.host import this_host
from configs.attention import AttentionOverrides
from configs.compute import CompileMode, ComputeSettings, ModelPrecision, StepCache
from configs.job import JobParameters
from configs.model_preset import BUNDLED_MODEL, ModelPreset, find_model
from configs.resolve import GenerationRequest, resolve
from pipelines import LoadedPipeline, load_pipeline
from pipelines.bundled.prompts import prompt
from pipelines.bundled.read_back import read_attributes
from pipelines.bundled.training.evaluate import contact_sheet
from pipelines.bundled.world import ClipSpec, held_out_specs

REPORT_EVERY_PROMPTS = 10
# Which flags go to which attention.
FLAGS = {
    DENSE: (),
    DEFAULT: ("block_size", "anchor_stride", "dense_steps"),
    WINDOW: ("window", "window_unit", "global_frames", "dense_steps"),
    BLOCK_TOPK: ("top_k", "pooled_rest", "tile_thw", "dense_steps"),
}


def jobs(
    preset: ModelPreset, requests: dict[str, GenerationRequest], prompts: int
) -> Iterator[tuple[int, ClipSpec, str, JobParameters]]:
    """Every prompt with each attention in turn: number, spec, name of the attention, job."""
    for number, spec in enumerate(held_out_specs()[:prompts]):
        for name, request in requests.items():
            asked = request.model_copy(update={"prompt": prompt(spec), "seed": number})
            yield number, spec, name, resolve(asked, preset, preset.attention)


def measure(
    loaded: LoadedPipeline, requests: dict[str, GenerationRequest], prompts: int, weights: str, folder: Path
) -> dict[str, Run]:
    """Make and read every clip; progress goes to standard output."""
    runs = {name: Run([], []) for name in requests}
    for name in requests:
        (folder / name).mkdir(parents=True, exist_ok=True)
    for number, spec, name, params in jobs(loaded.preset, requests, prompts):
        path = folder / name / f"{number:03d}.mp4"
        result = make_clip(loaded, params, weights, path)
        frames = read_frames(path, result)
        run = runs[name]
        run.seen.append(Seen(spec, params, result, read_attributes(frames)))
        if number < SHEET_CLIPS:
            run.frames.append(frames)
        if (number + 1) % REPORT_EVERY_PROMPTS == 0:
            print(f"{name}: {run.score.all_five:.3f} of {number + 1}, {run.seconds.median:.2f} s", flush=True)
    return runs


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    preset = find_model(BUNDLED_MODEL)
    if preset.folder is None:
        parser.error(f"the folder of {BUNDLED_MODEL} ({preset.source}) is missing")
    try:
        requests = _requests(arguments)
        for _ in jobs(preset, requests, arguments.prompts):
            pass
    except ValueError as error:
        parser.error(str(error))
    weights = weights_sha256(preset.folder)
    compute = ComputeSettings(compile=arguments.compile, precision=arguments.precision)
    loaded = load_pipeline(preset, device=arguments.device, dtype=arguments.dtype, compute=compute)
    print(f"{loaded.dtype} on {loaded.device}, {this_host()}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        runs = measure(loaded, requests, arguments.prompts, weights, arguments.clips or Path(scratch))
    print_report(runs)
    if arguments.sheet:
        contact_sheet(sheet_clips(runs), arguments.sheet)
    if arguments.json:
        arguments.json.write_text(json.dumps(as_json(loaded, runs, weights), indent=1) + "\n")


def _requests(arguments: argparse.Namespace) -> dict[str, GenerationRequest]:
    """A request for each attention setting; prompt and seed are filled in later. Raises ValueError."""
    flags = {flag for names in FLAGS.values() for flag in names}
    said = {name: value for name in flags if (value := getattr(arguments, name)) is not None}
    attentions = {
        name: ({} if name == DEFAULT else {"backend": name})
        | {flag: said[flag] for flag in FLAGS[name] if flag in said}
        for name in dict.fromkeys(arguments.attention)
    }
    if unused := sorted(said.keys() - {flag for name in attentions for flag in FLAGS[name]}):
        chosen = " ".join(attentions)
        raise ValueError(f"{', '.join(unused)} has no effect with --attention {chosen}; leave it out")
    names = ("size", "num_frames", "num_inference_steps", "guidance_scale", "step_cache")
    clip = {name: getattr(arguments, name) for name in names}
    return {
        name: GenerationRequest(
            prompt="filled in later", attention=AttentionOverrides.model_validate(each), **clip
        )
        for name, each in attentions.items()
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prompt_following",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    most = len(held_out_specs())
    parser.add_argument("--step-cache", choices=get_args(StepCache))
    parser.add_argument("--precision", choices=get_args(ModelPrecision), default="full")
    parser.add_argument("--compile", choices=get_args(CompileMode), default="auto")
    parser.add_argument("--prompts", type=int, default=200, choices=range(1, most + 1), metavar=f"1..{most}")
    parser.add_argument(
        "--attention",
        nargs="+",
        choices=tuple(FLAGS),
        default=(DENSE, DEFAULT),
        help="one or more, each with all prompts; default: dense default (the model's own)",
    )
    parser.add_argument("--block-size", help="of default: tokens, or auto")
    parser.add_argument("--anchor-stride", help="of default: tokens, or auto")
    parser.add_argument("--window", help="of window: units to either side, or auto")
    parser.add_argument("--window-unit", help="of window: frames or tokens")
    parser.add_argument("--global-frames", type=int, help="of window: first latent frames that all see")
    parser.add_argument("--top-k", type=float, help="of block_topk: boxes kept; below 1 a share of all")
    parser.add_argument("--pooled-rest", action="store_true", default=None, help="of block_topk")
    parser.add_argument(
        "--tile-thw", nargs=3, type=int, metavar=("TIME", "HEIGHT", "WIDTH"), help="of block_topk: a box"
    )
    parser.add_argument("--dense-steps", type=float, help="first steps that run dense; below 1 a share")
    parser.add_argument("--size", help="<width>x<height>")
    parser.add_argument("--num-frames", type=int)
    parser.add_argument("--steps", type=int, dest="num_inference_steps")
    parser.add_argument("--guidance-scale", type=float)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<index>")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--clips", type=Path, help="folder that keeps the MP4s; a run goes on from them")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--sheet", type=Path, help="write a contact sheet of the first clips here (PNG)")
    return parser


if __name__ == "__main__":
    main()
