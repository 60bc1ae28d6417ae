"""Reading the body of a request into a model: JSON, or a multipart form.

Knows: content types, their parsers and their bounds. JSON is strict (a number is a number), a form is text.
Does not know: what the model means.
"""

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.requests import Request

from server.errors import ApiError
from server.forms import FormError, nest
from server.validation import Problem, problem_of_body, unknown_field

MAX_FORM_FIELDS = 200

Body = TypeVar("Body", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class BodyRules:
    """Bounds in bytes, of JSON or the texts of a form, and of one file; and what is not plain text in a form.

    Attributes:
        files: fields that are a file, or the text that stands for one.
        documents: fields that are a JSON text, or a file with one.
    """

    max_text_bytes: int
    max_file_bytes: int
    files: frozenset[str] = frozenset()
    documents: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class RawBody:
    """A body that was parsed but means nothing yet: a JSON text or the fields of a form, and its files."""

    content: bytes | dict[str, Any]
    names: frozenset[str]
    files: dict[str, bytes]
    rules: BodyRules

    def as_model(self, model: type[Body]) -> Body:
        """The body as ``model``. Raises ApiError: 400 naming the field."""
        for name in self.files:
            if name not in model.model_fields:
                raise ApiError.invalid(unknown_field(name, model.model_fields))
            if name not in self.rules.files:
                raise ApiError.invalid(FormError(name, "must be text, not a file").problem)
        try:
            if isinstance(self.content, bytes):
                return model.model_validate_json(self.content, strict=True)
            return model.model_validate(self.content)
        except ValidationError as error:
            raise ApiError.invalid(problem_of_body(error, model)) from error


async def read_body(request: Request, rules: BodyRules) -> RawBody:
    """The body. Raises ApiError: 400, 413 or 415."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        message = f"Content-Encoding {encoding[:80]!r} is not supported; send the body as it is"
        raise ApiError(415, "unsupported_media_type", message)
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind == "application/json":
        body = await request.body()
        found = _parse_json(body, "the body")
        return RawBody(body, frozenset(found) if isinstance(found, dict) else frozenset(), {}, rules)
    if kind == "multipart/form-data":
        return await _read_form(request, rules)
    raise ApiError(
        415,
        "unsupported_media_type",
        f"Content-Type {kind[:80]!r} is not supported; send application/json "
        "(curl: -H 'Content-Type: application/json' -d '{...}') or multipart/form-data (curl: -F name=value)",
    )


class _RepeatedKeyError(Exception):
    """One of two values would be ignored."""


def _parse_json(text: bytes | str, what: str, param: str | None = None) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except _RepeatedKeyError as error:
        problem = Problem("invalid_json", f"{what} has the key {error!s:.80} more than once", param)
    except RecursionError:
        problem = Problem("invalid_json", f"{what} is not valid JSON: it is nested too deeply", param)
    except ValueError as error:
        problem = Problem("invalid_json", f"{what} is not valid JSON: {error}", param)
    raise ApiError.invalid(problem)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        repeated = next(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        raise _RepeatedKeyError(ascii(repeated))
    return found


async def _read_form(request: Request, rules: BodyRules) -> RawBody:
    parser = request.form(
        max_fields=MAX_FORM_FIELDS, max_files=MAX_FORM_FIELDS, max_part_size=rules.max_text_bytes
    )
    try:
        async with parser as form:
            files = await _files(form, rules)
            content: dict[str, Any] = dict(nest(_texts(form, rules.max_text_bytes)))
        for name in files.keys() & content.keys():
            raise FormError(name, "is given more than once")
    except FormError as error:
        raise ApiError.invalid(error.problem) from error
    except (HTTPException, UnicodeError) as error:
        reason = error.detail if isinstance(error, HTTPException) else error
        raise ApiError.invalid(Problem("invalid_form", f"the form cannot be read: {reason}")) from error
    for name in rules.documents:
        text = files.pop(name, None) or content.get(name)
        if isinstance(text, bytes | str):
            content[name] = _parse_json(text, name, name)
    return RawBody(content, frozenset(content) | frozenset(files), files, rules)


def _texts(form: FormData, max_bytes: int) -> list[tuple[str, str]]:
    fields = [(name, value) for name, value in form.multi_items() if isinstance(value, str)]
    # Some charsets give halves of characters, which nothing can store: then this raises.
    if sum(len(f"{name}{value}".encode()) for name, value in fields) > max_bytes:
        raise ApiError(413, "body_too_large", f"the texts of the form are larger than {max_bytes} bytes")
    return fields


async def _files(form: FormData, rules: BodyRules) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for name, value in form.multi_items():
        if isinstance(value, str) or not (value.filename or value.size):
            continue  # text, or a browser's file field with no file chosen
        name.encode()  # as above
        if name in files:
            raise FormError(name, "is given more than once")
        most = rules.max_file_bytes if name in rules.files else rules.max_text_bytes
        if (value.size or 0) > most:
            message = f"the file {name[:80]!r} is larger than {most} bytes"
            raise ApiError(413, "body_too_large", message, param=name[:80])
        files[name] = await value.read()
    return files
