"""The settings in force as text, for ``reelwright config show``.

Knows: how a value and its origin are written, and which values are secrets. Does not know: what they mean.
"""

import json
import re
from typing import Any

from pydantic import SecretStr

from configs.settings import Settings
from configs.sources import SourcedSettings

MASK = "********"
SHOWN_DIGITS = 8
_PASSWORD = re.compile(r"^(\w+://[^:/?@]*:).*@")
_PASSWORD_PARAMETER = re.compile(r"([?&]\w*password=)[^&]*", re.IGNORECASE)


def as_table(sourced: SourcedSettings) -> str:
    """One line a setting: name, value, where it came from."""
    rows = [(field, _text(value), _origin_text(sourced, field)) for field, value in _shown(sourced.settings)]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}" for name, value, origin in rows)


def as_json_text(sourced: SourcedSettings) -> str:
    """One object a setting: value, source, and the name of flag, variable, or file and key."""
    report = {
        field: {
            "value": value,
            "source": sourced.origins[field].source,
            "name": sourced.origins[field].name,
        }
        for field, value in _shown(sourced.settings)
    }
    return json.dumps(report, indent=2)


def _shown(settings: Settings) -> list[tuple[str, Any]]:
    plain = settings.model_dump(mode="json")
    return [(field, _masked(field, getattr(settings, field), plain[field])) for field in plain]


def _masked(field: str, value: object, plain: Any) -> Any:
    if field == "database_url" and isinstance(value, SecretStr):
        return _without_passwords(value.get_secret_value())
    if isinstance(value, SecretStr):
        return MASK
    if field == "api_keys_sha256":
        return [f"{digest[:SHOWN_DIGITS]}..." for digest in plain]  # enough to tell which key it is
    return plain


def _without_passwords(url: str) -> str:
    return _PASSWORD_PARAMETER.sub(rf"\1{MASK}", _PASSWORD.sub(rf"\1{MASK}@", url))


def _text(value: Any) -> str:
    if value is None or value == []:
        return "-"
    if isinstance(value, list):
        return ", ".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _origin_text(sourced: SourcedSettings, field: str) -> str:
    origin = sourced.origins[field]
    return origin.source if origin.name is None else f"{origin.source} {origin.name}"
