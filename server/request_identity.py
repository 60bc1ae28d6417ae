"""Whether two submissions with one idempotency key are the same request.

Knows: that only what the client sent counts, however it was written. Does not know: keys, or jobs. Fields
that were left out do not count, nor does what the server makes of a request: a retry may meet a newer
version, which has more fields and other defaults.
"""

import hashlib
import json
from typing import Any

from pydantic import BaseModel


def request_sha256(request: BaseModel) -> str:
    """SHA-256 (hex) of the fields that were sent: JSON or form, in any order, 4 or 4.0, null or left out."""
    sent = _plain(request.model_dump(mode="json", exclude_unset=True, exclude_none=True))
    text = json.dumps(sent, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: Any) -> Any:
    match value:
        case dict():
            return {key: _plain(each) for key, each in value.items()}
        case list():
            return [_plain(each) for each in value]
        case float() if value.is_integer():
            return int(value)
        case _:
            return value
