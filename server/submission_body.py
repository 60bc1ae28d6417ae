"""How the OpenAPI document describes the body that the submitting routes read themselves.

Knows: two content types and two models. Does not know: how they are read (server/intake.py).
"""

from typing import Any

from pydantic.json_schema import models_json_schema

from server.schemas import RerunRequest, VideoRequest

_TEMPLATE = "#/components/schemas/{model}"
_MODELS = (VideoRequest, RerunRequest)

# Where files come in, so bodies may be larger.
UPLOAD_PATHS = frozenset({"/v1/videos", "/v1/videos/estimate"})

SUBMISSION_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            kind: {"schema": {"anyOf": [{"$ref": _TEMPLATE.format(model=m.__name__)} for m in _MODELS]}}
            for kind in ("application/json", "multipart/form-data")
        },
    }
}


def submission_schemas() -> dict[str, Any]:
    """The component schemas that SUBMISSION_BODY refers to, and those that they refer to."""
    _, document = models_json_schema([(m, "validation") for m in _MODELS], ref_template=_TEMPLATE)
    schemas: dict[str, Any] = document["$defs"]
    return schemas
