"""Multipart forms as nested objects: ``attention[block_size]=64``, ``attention[dense_layers][]=0``.

Knows: the bracket notation. Does not know: which fields exist, or their types; every value stays text.
"""

import re
from collections.abc import Iterable

from server.validation import Problem

FormValue = str | list[str] | dict[str, "FormValue"]
_NAME = re.compile(r"(?P<first>[^\[\]]+)(?P<rest>(\[[^\[\]]*\]){0,3})")


class FormError(ValueError):
    """A form that makes no object."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.problem = Problem("invalid_value", f"form field {name[:80]!r} {message}", name[:80])


def nest(fields: Iterable[tuple[str, str]]) -> dict[str, FormValue]:
    """The object that the fields spell. Raises FormError for a name given twice or used in two ways."""
    root: dict[str, FormValue] = {}
    for name, value in fields:
        *parents, last = _split(name)
        owner = root
        for parent in parents:
            inner = owner.setdefault(parent, {})
            if not isinstance(inner, dict):
                raise FormError(name, "is used as a value and as an object")
            owner = inner
        _put(owner, name, last, value)
    return root


def _put(owner: dict[str, FormValue], name: str, last: str, value: str) -> None:
    if not name.endswith("[]"):
        if last in owner:
            raise FormError(name, "is given more than once")
        owner[last] = value
        return
    values = owner.setdefault(last, [])
    if not isinstance(values, list):
        raise FormError(name, "is used as a list and as a value")
    values.append(value)


def _split(name: str) -> list[str]:
    """``a[b][]`` -> ``["a", "b"]``."""
    match = _NAME.fullmatch(name)
    parts = [match["first"], *re.findall(r"\[([^\[\]]*)\]", match["rest"])] if match else []
    if parts[-1:] == [""]:
        parts.pop()
    if not parts or "" in parts:
        raise FormError(name, "is not of the form name, name[key] or name[]")
    return parts
