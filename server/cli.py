"""The ``reelwright`` command.

Knows: commands, flags and exit codes (1: it failed, 2: it was asked for something impossible). Does not
know: how anything is done; what a command needs is imported when it runs, so --help is quick.
"""

from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from configs.job import JobCancelledError, JobFailedError
from configs.resolve import GenerationRequest
from configs.settings import Settings, SettingsError
from configs.sources import SourcedSettings
from server.options import ATTENTION_FIELDS, MODEL_FIELDS, with_settings, with_sourced_settings
from server.version import package_version

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
config_app = typer.Typer(no_args_is_help=True, help="Look at the settings.")
app.add_typer(config_app, name="config")


def main() -> None:
    """Entry point."""
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
    from server.serve import StartError, serve

    try:
        serve(settings)
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
@with_settings((*MODEL_FIELDS, *ATTENTION_FIELDS))
def generate_command(
    settings: Settings,
    prompt: Annotated[str, typer.Argument(help="What the clip should show.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The MP4 to write; replaced if there.")],
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

    from server.generate import plan, report, run
    from server.validation import problem_of_body

    try:
        request = GenerationRequest(
            prompt=prompt,
            negative_prompt=negative_prompt,
            size=size,
            seconds=seconds,
            num_frames=num_frames,
            fps=fps,
            num_inference_steps=steps,
            guidance_scale=guidance_scale,
            seed=seed,
        )
    except ValidationError as error:
        raise SettingsError(problem_of_body(error, GenerationRequest).message) from error
    planned = plan(settings, request, output)
    try:
        report(planned, run(planned, Console(stderr=True)), Console())
    except JobFailedError as error:
        _end(f"error: {error.code}: {error.message}", 1)
    except JobCancelledError:
        _end("interrupted; nothing was written", 130)


def _end(message: str, exit_code: int) -> None:
    typer.secho(message, err=True, fg=typer.colors.RED)
    raise SystemExit(exit_code)


if __name__ == "__main__":
    main()
