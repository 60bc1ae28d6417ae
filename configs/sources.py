"""Where settings come from: flags, over the environment, over a YAML file, over the defaults.

Knows: the sources and their order, and for each setting in force which one gave it. Does not know: what
settings mean (configs/settings.py), or the command line.
"""

import difflib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic_settings import EnvSettingsSource

from configs.settings import PREFIX, Settings, SettingsError, flag_name, variable_name

CONFIG_VARIABLE = f"{PREFIX}CONFIG"
CONFIG_FLAG = "--config"


@dataclass(frozen=True, slots=True)
class Origin:
    """Who said a value; ``name`` is the flag, the variable, or file and key."""

    source: Literal["flag", "environment", "file", "default"]
    name: str | None = None


@dataclass(frozen=True, slots=True)
class SourcedSettings:
    """Settings and where each came from."""

    settings: Settings
    origins: Mapping[str, Origin]


@dataclass(frozen=True, slots=True)
class _Value:
    value: Any
    origin: Origin


def load_settings(flags: Mapping[str, object], config: Path | None = None) -> Settings:
    """Settings alone; see ``load_sourced_settings``."""
    return load_sourced_settings(flags, config).settings


def load_sourced_settings(flags: Mapping[str, object], config: Path | None = None) -> SourcedSettings:
    """Settings from flags (None: not given), the environment, a YAML file and the defaults.

    The file is ``config``, or the one that ``REELWRIGHT_CONFIG`` names; without either none is read.

    Raises:
        SettingsError: a value is wrong, or a variable or a key of the file does not exist.
    """
    _check_variable_names(os.environ)
    path = config or _path_from_environment(os.environ)
    said = (_read_file(path) if path else {}) | _read_environment() | _read_flags(flags)
    try:
        settings = Settings.model_validate({field: each.value for field, each in said.items()})
    except ValidationError as error:
        raise SettingsError(_problems(error, said)) from error
    default = Origin("default")
    origins = {field: said[field].origin if field in said else default for field in Settings.model_fields}
    return SourcedSettings(settings, origins)


def _path_from_environment(environment: Mapping[str, str]) -> Path | None:
    named = environment.get(CONFIG_VARIABLE)
    return Path(named) if named else None


def _read_flags(flags: Mapping[str, object]) -> dict[str, _Value]:
    return {
        field: _Value(value, Origin("flag", flag_name(field)))
        for field, value in flags.items()
        if value is not None
    }


def _read_environment() -> dict[str, _Value]:
    return {
        field: _Value(value, Origin("environment", variable_name(field)))
        for field, value in EnvSettingsSource(Settings)().items()
    }


def _read_file(path: Path) -> dict[str, _Value]:
    try:
        content = yaml.load(path.expanduser().read_bytes(), _StrictLoader)
    except (OSError, RuntimeError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise SettingsError(f"configuration file {path} cannot be read: {reason}") from error
    if not isinstance(content, dict | None):
        raise SettingsError(f"configuration file {path} must hold lines of the form name: value")
    return {
        field: _Value(_checked(path, field, value), Origin("file", f"{path}:{field}"))
        for field, value in (content or {}).items()
    }


def _checked(path: Path, field: object, value: Any) -> Any:
    """The value of a key that exists, in its own type: in YAML a number is a number and a list a list."""
    if field not in Settings.model_fields:
        hint = f"did you mean {_nearest(str(field), Settings.model_fields)}?"
        raise SettingsError(f"configuration file {path}: {field} is not a setting; {hint}")
    info = Settings.model_fields[str(field)]
    kind: Any = Annotated[info.annotation, None, *info.metadata]  # None: some settings have no metadata
    expected: TypeAdapter[Any] = TypeAdapter(kind)
    try:
        expected.validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        said = dict.fromkeys(_message(entry) for entry in error.errors())
        raise SettingsError(f"{path}:{field}: {' or '.join(said)}") from error
    except ValueError as error:  # an integer with thousands of digits
        raise SettingsError(f"{path}:{field}: {error}") from error
    except TypeError as error:  # YAML has more types than settings have
        raise SettingsError(f"{path}:{field}: no setting is a {type(value).__name__}") from error
    return value


class _StrictLoader(yaml.SafeLoader):
    """YAML in which no key is given twice, since the first would be lost without a word, and nothing is
    repeated by an alias: a few lines of those spell a list that no memory holds, or one without an end."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("an alias (*name) stands for a value; write the value out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        for key, times in Counter(keys).items():
            if times > 1:
                raise yaml.YAMLError(f"{key} is given more than once")
        return mapping


def _check_variable_names(environment: Mapping[str, str]) -> None:
    known = {CONFIG_VARIABLE} | {variable_name(field) for field in Settings.model_fields}
    for name in environment:
        if name.upper().startswith(PREFIX) and name.upper() not in known:
            near = _nearest(name.upper(), known)
            raise SettingsError(f"environment variable {name} is not a setting; did you mean {near}?")


def _nearest(name: str, known: Iterable[str]) -> str:
    return difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)[0]


def _problems(error: ValidationError, said: Mapping[str, _Value]) -> str:
    messages: dict[str, list[str]] = {}
    for entry in error.errors():
        messages.setdefault(str(entry["loc"][0]), []).append(_message(entry))
    return "; ".join(f"{_where(said[field])}: {' or '.join(text)}" for field, text in messages.items())


def _where(value: _Value) -> str:
    if value.origin.source == "file":
        return str(value.origin.name)
    field = str(value.origin.name).removeprefix(PREFIX).removeprefix("--").replace("-", "_").lower()
    return f"{flag_name(field)} ({variable_name(field)})"


def _message(entry: Any) -> str:
    return str(entry["msg"]).removeprefix("Value error, ")
