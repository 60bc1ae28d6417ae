"""Reading the body of a request into a model: JSON, or a multipart form.

Knows: content types and their parsers. JSON is strict (a number is a number), a form is text. Does not
know: what the model means.
"""

from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request

from server.errors import ApiError
from server.forms import FormError, nest
from server.validation import Problem, problem_of_body, unknown_field

MAX_FORM_FIELDS = 200

Body = TypeVar("Body", bound=BaseModel)


async def read_body(request: Request, model: type[Body]) -> Body:
    """The body as ``model``. Raises ApiError: 400 naming the field, or 415."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    try:
        if kind == "application/json":
            return model.model_validate_json(await request.body(), strict=True)
        if kind == "multipart/form-data":
            return model.model_validate(await _read_form(request, model))
    except ValidationError as error:
        raise ApiError.invalid(problem_of_body(error, model)) from error
    raise ApiError(
        415,
        "unsupported_media_type",
        f"Content-Type {kind[:80]!r} is not supported; send application/json "
        "(curl: -H 'Content-Type: application/json' -d '{...}') or multipart/form-data (curl: -F name=value)",
    )


async def _read_form(request: Request, model: type[Body]) -> object:
    try:
        async with request.form(max_fields=MAX_FORM_FIELDS, max_files=MAX_FORM_FIELDS) as form:
            return nest(_texts(form, model))
    except FormError as error:
        raise ApiError.invalid(error.problem) from error
    except (HTTPException, UnicodeError) as error:
        reason = error.detail if isinstance(error, HTTPException) else error
        raise ApiError.invalid(Problem("invalid_form", f"the form cannot be read: {reason}")) from error


def _texts(form: FormData, model: type[Body]) -> list[tuple[str, str]]:
    fields: list[tuple[str, str]] = []
    for name, value in form.multi_items():
        if isinstance(value, UploadFile):
            if name not in model.model_fields:
                raise ApiError.invalid(unknown_field(name, model.model_fields))
            raise FormError(name, "must be text, not a file")
        f"{name}{value}".encode()  # some charsets give halves of characters, which nothing can store
        fields.append((name, value))
    return fields
