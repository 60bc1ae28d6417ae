"""From pydantic's errors to one problem that a person can act on.

Knows: how to name a field (``attention.block_size``) and the nearest known name of an unknown one.
Does not know: HTTP statuses, or which bodies there are.
"""

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

MAX_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with a request, and in which field."""

    code: str
    message: str
    param: str | None = None


def problem_of(errors: Sequence[Any], model: type[BaseModel]) -> Problem:
    """One problem for pydantic's list of errors: the first field at fault, with all that is said of it."""
    found = [_single(entry, model) for entry in errors]
    first = found[0]
    said = dict.fromkeys(problem.message for problem in found if problem.param == first.param)
    value = errors[0].get("input")
    shown = "" if first.code != "invalid_value" or first.param is None else f", got {_short(value)}"
    return Problem(first.code, " or ".join(said) + shown, first.param)


def problem_of_body(error: ValidationError, model: type[BaseModel]) -> Problem:
    """The problem of a body that is no ``model``."""
    return problem_of(error.errors(include_url=False), model)


def unknown_field(name: str, known: Iterable[str], prefix: str = "") -> Problem:
    """A field that does not exist; nothing is ever accepted and ignored."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"did you mean {prefix + near[0]!r}?" if near else f"known: {', '.join(names)}"
    param = (prefix + name)[:MAX_SHOWN]
    return Problem("unknown_field", f"unknown field {param!r}; {hint}", param)


def _single(entry: Any, model: type[BaseModel]) -> Problem:
    path, owner = _path(entry["loc"], model)
    kind, text = entry["type"], str(entry["msg"]).removeprefix("Value error, ")
    if kind == "json_invalid":
        return Problem("invalid_json", f"the body is not valid JSON: {text}")
    if kind == "extra_forbidden":
        prefix = f"{path}." if path else ""
        return unknown_field(str(entry["loc"][-1]), owner.model_fields, prefix)
    if kind == "missing":
        return Problem("missing_field", f"{path} is required", path)
    return Problem("invalid_value", f"{path}: {text}" if path else f"the body: {text}", path or None)


def _path(loc: Sequence[str | int], model: type[BaseModel]) -> tuple[str, type[BaseModel]]:
    """The dotted name of a location, without pydantic's own parts, and the innermost model on the way."""
    path, owner, expects_key = "", model, False
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif expects_key:
            path += f".{part[:MAX_SHOWN]}"
            expects_key = False
        elif part in owner.model_fields:
            annotation = owner.model_fields[part].annotation
            path = f"{path}.{part}" if path else part
            owner = _find(annotation, _is_model) or owner
            expects_key = _find(annotation, _is_mapping) is not None
    return path, owner


def _find(annotation: Any, wanted: Callable[[Any], bool]) -> Any:
    """The first part of a type (``dict[str, int] | None`` has three) that is wanted, or None."""
    if wanted(annotation):
        return annotation
    return next((found for part in get_args(annotation) if (found := _find(part, wanted))), None)


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _is_mapping(annotation: Any) -> bool:
    return get_origin(annotation) is dict


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."
