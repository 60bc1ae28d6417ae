"""``reelwright profile``: one denoise step of the settings' model, taken apart.

Knows: the terminal and where the files go. Does not know: how a step is looked at.
"""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from configs.job import JobParameters
from configs.model_preset import ModelPreset
from configs.resolve import GenerationRequest, RequestError, resolve
from configs.settings import Settings, SettingsError
from server.model_choice import choose_model
from server.torch_environment import set_up_torch_environment


@dataclass(frozen=True, slots=True)
class ProfilePlan:
    """What will run."""

    settings: Settings
    preset: ModelPreset
    parameters: JobParameters
    output: Path


def plan_profile(settings: Settings, request: GenerationRequest, output: Path) -> ProfilePlan:
    """Check everything that costs nothing to check. Raises SettingsError."""
    if output.suffix.lower() != ".json":
        raise SettingsError(f"--output {output} must end in .json; the picture is written beside it as .svg")
    if not output.absolute().parent.is_dir():
        raise SettingsError(f"--output {output} is not a file in an existing folder")
    preset, attention = choose_model(settings)
    try:
        return ProfilePlan(settings, preset, resolve(request, preset, attention), output)
    except RequestError as error:
        raise SettingsError(str(error)) from error


def run_profile(plan: ProfilePlan, console: Console) -> None:
    """Profile, write both files, and say what they hold.

    Raises:
        JobFailedError: the model cannot be loaded, or the clip does not fit.
    """
    set_up_torch_environment()
    from pipelines import load_pipeline
    from pipelines.profile_picture import drawn
    from pipelines.profiling import profile_step, write_profile

    settings = plan.settings
    loaded = load_pipeline(
        plan.preset,
        device=settings.device,
        dtype=settings.dtype,
        memory=settings.memory,
        compute=settings.compute,
    )
    found = profile_step(loaded, plan.parameters)
    picture = write_profile(found, plan.output, drawn)
    console.print(
        f"one step {found.seconds:.4f} s, peak {found.peak_memory_bytes / 2**20:.0f} MiB", highlight=False
    )
    for kind, seconds in found.seconds_by_kind.items():
        share = seconds / found.kernel_seconds if found.kernel_seconds else 0.0
        console.print(f"{kind:>12}  {seconds:.4f} s  {share:.0%}", highlight=False)
    console.print(f"{plan.output}, {picture}", highlight=False, soft_wrap=True)
