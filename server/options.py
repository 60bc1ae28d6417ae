"""Command-line flags made from the settings, so each has its name, default and meaning in one place.

Knows: how a settings field becomes a flag. Does not know: what the commands do with the settings.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar

import typer

from configs.settings import Settings, flag_name, variable_name
from configs.sources import CONFIG_FLAG, CONFIG_VARIABLE, SourcedSettings, load_sourced_settings

Own = ParamSpec("Own")
Given = TypeVar("Given")
CONFIG = "config"
MODEL_FIELDS = (
    "model",
    "device",
    "dtype",
    "vae_dtype",
    "compile",
    "fused",
    "precision",
    "guidance_batching",
    "step_cache",
    "offload",
    "feed_forward_chunks",
    "memory_limit_bytes",
)
ATTENTION_FIELDS = (
    "attention_backend",
    "token_order",
    "block_size",
    "block_unit",
    "tile_thw",
    "anchor_stride",
    "anchor_offset",
    "anchor_rotation",
    "attention_precision",
    "window",
    "window_unit",
    "global_frames",
    "top_k",
    "pooled_rest",
    "dense_steps",
    "min_tokens",
)


def with_settings(
    fields: Iterable[str],
) -> Callable[[Callable[Concatenate[Settings, Own], None]], Callable[Own, None]]:
    """Decorate a command that takes settings first: it gets ``--config`` and a flag for each of ``fields``.

    Flags win over the environment, and that over the file. Raises SettingsError (when called) for a wrong
    value.
    """
    return _with_flags(fields, lambda sourced: sourced.settings)


def with_sourced_settings(
    fields: Iterable[str],
) -> Callable[[Callable[Concatenate[SourcedSettings, Own], None]], Callable[Own, None]]:
    """As ``with_settings``, for a command that also asks where the values came from."""
    return _with_flags(fields, lambda sourced: sourced)


def _with_flags(
    fields: Iterable[str], choose: Callable[[SourcedSettings], Given]
) -> Callable[[Callable[Concatenate[Given, Own], None]], Callable[Own, None]]:
    flags = [_flag(field) for field in fields]

    def decorate(command: Callable[Concatenate[Given, Own], None]) -> Callable[Own, None]:
        own = list(inspect.signature(command).parameters.values())[1:]

        @functools.wraps(command)
        def wrapper(*args: Own.args, **kwargs: Own.kwargs) -> None:
            given = {flag.name: kwargs.pop(flag.name) for flag in flags}
            config: Any = kwargs.pop(CONFIG)
            command(choose(load_sourced_settings(given, config)), *args, **kwargs)

        parameters = [*own, _config_flag(), *flags]
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return wrapper

    return decorate


def _config_flag() -> inspect.Parameter:
    text = f"YAML file of settings; flags and environment variables win over it. [{CONFIG_VARIABLE}]"
    option = typer.Option(CONFIG_FLAG, help=text, show_default=False)
    return inspect.Parameter(
        CONFIG, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[Path | None, option]
    )


def _flag(field: str) -> inspect.Parameter:
    info = Settings.model_fields[field]
    default = "" if info.default in (None, (), False) else f" Default: {info.default}."
    flag_type: Any = bool if info.annotation is bool else str  # the settings parse and check the text
    name = flag_name(field)
    # The word against it is needed where a file or variable said yes.
    names = f"{name}/--no-{name.removeprefix('--')}" if flag_type is bool else name
    option = typer.Option(
        names, help=f"{info.description}{default} [{variable_name(field)}]", show_default=False
    )
    return inspect.Parameter(
        field,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[flag_type | None, option],
    )
