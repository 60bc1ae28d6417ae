"""The ``reelwright`` command.

Knows: commands, flags and exit codes (1: it failed, 2: it was asked for something impossible). Does not
know: how anything is done; what a command needs is imported when it runs, so --help is quick.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from pydantic import ValidationError

from configs.job import JobCancelledError, JobFailedError
from configs.resolve import GenerationRequest
from configs.settings import Settings, SettingsError, flag_name
from configs.sources import SourcedSettings
from server.attention_cli import attention_app
from server.options import ATTENTION_FIELDS, MODEL_FIELDS, with_settings, with_sourced_settings
from server.process_end import run_to_end
from server.version import package_version

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
config_app = typer.Typer(no_args_is_help=True, help="Look at the settings.")
app.add_typer(config_app, name="config")
app.add_typer(attention_app, name="attention")


def main() -> NoReturn:
    """Entry point."""
    run_to_end(run_command)


def run_command() -> None:
    """What ``sys.argv`` asks for. Raises SystemExit."""
    try:
        app()
    except SettingsError as error:
        _end(f"error: {error}", 2)
    except KeyboardInterrupt:  # before there is anything to end in order
        _end("interrupted", 130)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False,
) -> None:
    """Prompts in, MP4 files out."""
    if version:
        typer.echo(f"reelwright {package_version()}")
        raise typer.Exit


@app.command("serve")
@with_settings(Settings.model_fields)
def serve_command(settings: Settings) -> None:
    """Serve the HTTP API."""
    from server.serve import serve
    from server.starting import StartError

    try:
        serve(settings)
    except StartError as error:
        _end(f"error: {error}", 1)


@app.command("worker")
@with_settings(Settings.model_fields)
def worker_command(settings: Settings) -> None:
    """Run jobs for the API processes of the same database, on this host."""
    from server.starting import StartError
    from server.work import work

    try:
        work(settings)
    except StartError as error:
        _end(f"error: {error}", 1)


@config_app.command("show")
@with_sourced_settings(Settings.model_fields)
def show_config_command(
    sourced: SourcedSettings,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Print every setting in force and where it came from. Secrets are masked."""
    from server.config_report import as_json_text, as_table

    typer.echo(as_json_text(sourced) if as_json else as_table(sourced))


@app.command("generate")
@with_sourced_settings((*MODEL_FIELDS, *ATTENTION_FIELDS))
def generate_command(
    sourced: SourcedSettings,
    output: Annotated[Path, typer.Option("--output", "-o", help="The MP4 to write; replaced if there.")],
    prompt: Annotated[str | None, typer.Argument(help="What the clip should show.")] = None,
    manifest: Annotated[
        Path | None, typer.Option(help="Make the clip of this manifest again: a .json, or the clip's .mp4.")
    ] = None,
    negative_prompt: Annotated[str | None, typer.Option(help="What it should not show.")] = None,
    size: Annotated[str | None, typer.Option(help="WIDTHxHEIGHT in pixels.")] = None,
    seconds: Annotated[float | None, typer.Option(help="Length; the nearest valid frame count.")] = None,
    num_frames: Annotated[int | None, typer.Option(help="Length in frames, instead of --seconds.")] = None,
    fps: Annotated[int | None, typer.Option(help="Frames per second.")] = None,
    steps: Annotated[int | None, typer.Option(help="Denoise steps.")] = None,
    guidance_scale: Annotated[float | None, typer.Option(help="Above 1: classifier-free guidance.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed makes the same clip.")] = None,
) -> None:
    """Make one video, without a server. What is not given is the model's default."""
    from rich.console import Console

    from server.generate import plan, plan_rerun, report, run

    clip = {
        "prompt": prompt,
        "negative_prompt": negative_prompt,
        "size": size,
        "seconds": seconds,
        "num_frames": num_frames,
        "fps": fps,
        "num_inference_steps": steps,
        "guidance_scale": guidance_scale,
        "seed": seed,
    }
    if manifest is None:
        planned = plan(sourced.settings, _request(clip), output)
    else:
        _refuse_beside_manifest(clip, sourced)
        planned = plan_rerun(sourced.settings, manifest, output)
    try:
        report(planned, run(planned, Console(stderr=True)), Console())
    except JobFailedError as error:
        _end(f"error: {error.code}: {error.message}", 1)
    except JobCancelledError:
        _end("interrupted; nothing was written", 130)


@app.command("profile")
@with_settings((*MODEL_FIELDS, *ATTENTION_FIELDS))
def profile_command(
    settings: Settings,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The JSON to write; the picture goes beside it.")
    ] = Path("profile.json"),
    size: Annotated[str | None, typer.Option(help="WIDTHxHEIGHT in pixels.")] = None,
    num_frames: Annotated[int | None, typer.Option(help="Length in frames.")] = None,
    guidance_scale: Annotated[float | None, typer.Option(help="Above 1: classifier-free guidance.")] = None,
) -> None:
    """Take one denoise step of the model apart: a JSON file, and an SVG picture beside it."""
    from rich.console import Console

    from server.profile import plan_profile, run_profile

    clip = {
        "prompt": "a red circle moving left",
        "size": size,
        "num_frames": num_frames,
        "guidance_scale": guidance_scale,
        "seed": 0,
    }
    plan = plan_profile(settings, _request(clip), output)
    try:
        run_profile(plan, Console())
    except JobFailedError as error:
        _end(f"error: {error.code}: {error.message}", 1)


def _request(clip: Mapping[str, object]) -> GenerationRequest:
    from server.validation import problem_of_body

    if clip["prompt"] is None:
        raise SettingsError("say what the clip should show: a PROMPT, or --manifest FILE")
    try:
        return GenerationRequest.model_validate(clip)
    except ValidationError as error:
        raise SettingsError(problem_of_body(error, GenerationRequest).message) from error


def _refuse_beside_manifest(clip: Mapping[str, object], sourced: SourcedSettings) -> None:
    names = {"prompt": "PROMPT", "num_inference_steps": "--steps"}
    given = [names.get(field, flag_name(field)) for field, value in clip.items() if value is not None]
    of_clip = (*ATTENTION_FIELDS, "step_cache")
    given += [flag_name(field) for field in of_clip if sourced.origins[field].source == "flag"]
    if given:
        raise SettingsError(f"{', '.join(given)} cannot go with --manifest, which says all of the clip")


def _end(message: str, exit_code: int) -> None:
    typer.secho(message, err=True, fg=typer.colors.RED)
    raise SystemExit(exit_code)


if __name__ == "__main__":
    main()
