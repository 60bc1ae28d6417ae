"""Signatures as Standard Webhooks defines them: HMAC-SHA256 over id, time and body.

Knows: the secret and the three headers. Does not know: what is sent, or where.
"""

import base64
import binascii
import hashlib
import hmac

from pydantic import SecretStr

PREFIX = "whsec_"
MIN_KEY_BYTES, MAX_KEY_BYTES = 24, 64


class SecretError(ValueError):
    """A secret that is no ``whsec_`` and base64 of 24 to 64 bytes. The message never shows it."""


class Signer:
    """Signs messages with one secret. Raises SecretError."""

    def __init__(self, secret: SecretStr) -> None:
        self._key = _key_of(secret.get_secret_value())

    def headers(self, message_id: str, timestamp: int, body: bytes) -> dict[str, str]:
        """The headers of one try. ``timestamp``: Unix seconds of the try, so that old ones can be refused."""
        signed = f"{message_id}.{timestamp}.".encode() + body
        digest = hmac.new(self._key, signed, hashlib.sha256).digest()
        return {
            "webhook-id": message_id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
        }


def _key_of(secret: str) -> bytes:
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if secret.startswith(PREFIX) and MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        return key
    raise SecretError(
        f"a webhook secret is {PREFIX} and base64 of {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes; "
        'make one with: echo "whsec_$(openssl rand -base64 32)"'
    )
