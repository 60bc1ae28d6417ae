"""Command-line flags made from the settings, so each has its name, default and meaning in one place.

Knows: how a settings field becomes a flag. Does not know: what the commands do with the settings.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Concatenate, ParamSpec

import typer

from configs.settings import Settings, flag_name, load_settings, variable_name

Own = ParamSpec("Own")
MODEL_FIELDS = ("model", "device", "dtype")
ATTENTION_FIELDS = (
    "attention_backend",
    "block_size",
    "anchor_stride",
    "anchor_offset",
    "dense_steps",
    "min_tokens",
)


def with_settings(
    fields: Iterable[str],
) -> Callable[[Callable[Concatenate[Settings, Own], None]], Callable[Own, None]]:
    """Decorate a command that takes settings first: it gets a flag for each of ``fields``.

    Flags win over the environment. Raises SettingsError (when called) for a wrong value.
    """
    flags = [_flag(field) for field in fields]

    def decorate(command: Callable[Concatenate[Settings, Own], None]) -> Callable[Own, None]:
        own = list(inspect.signature(command).parameters.values())[1:]

        @functools.wraps(command)
        def wrapper(*args: Own.args, **kwargs: Own.kwargs) -> None:
            given = {flag.name: kwargs.pop(flag.name) for flag in flags}
            command(load_settings(given), *args, **kwargs)

        parameters = [*own, *flags]
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return wrapper

    return decorate


def _flag(field: str) -> inspect.Parameter:
    info = Settings.model_fields[field]
    default = "" if info.default in (None, (), False) else f" Default: {info.default}."
    flag_type: Any = bool if info.annotation is bool else str  # the settings parse and check the text
    option = typer.Option(
        flag_name(field), help=f"{info.description}{default} [{variable_name(field)}]", show_default=False
    )
    return inspect.Parameter(
        field,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[flag_type | None, option],
    )
