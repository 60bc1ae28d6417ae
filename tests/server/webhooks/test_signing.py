"""Signatures against the package of the Standard Webhooks project."""

import base64
import time

import pytest
from pydantic import SecretStr
from standardwebhooks import Webhook, WebhookVerificationError

from server.webhooks.signing import SecretError, Signer

SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()


def test_the_projects_own_package_accepts_the_signature() -> None:
    body = '{"type":"video.completed","data":{"prompt":"ein Kr\u00f6nchen"}}'.encode()
    headers = Signer(SecretStr(SECRET)).headers("msg_1", int(time.time()), body)
    assert Webhook(SECRET).verify(body, headers)["type"] == "video.completed"
    with pytest.raises(WebhookVerificationError):
        Webhook(SECRET).verify(body.replace(b"completed", b"failed"), headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(SECRET).verify(body, headers | {"webhook-id": "msg_2"})


def test_an_old_message_is_refused_by_its_time() -> None:
    headers = Signer(SecretStr(SECRET)).headers("msg_1", int(time.time()) - 3600, b"{}")
    with pytest.raises(WebhookVerificationError, match="old"):
        Webhook(SECRET).verify(b"{}", headers)


@pytest.mark.parametrize(
    "secret",
    [
        "",
        "whsec_",
        "whsec_!!!!",
        base64.b64encode(bytes(32)).decode(),
        "whsec_" + base64.b64encode(bytes(23)).decode(),
        "whsec_" + base64.b64encode(bytes(65)).decode(),
        "whsec_ä" + base64.b64encode(bytes(32)).decode(),
    ],
)
def test_a_bad_secret_is_refused_and_not_shown(secret: str) -> None:
    with pytest.raises(SecretError, match="24 to 64 bytes") as caught:
        Signer(SecretStr(secret))
    assert len(secret) < 10 or secret.removeprefix("whsec_") not in str(caught.value)
