"""Settings: which values are allowed, and that each one is documented."""

import base64
import re
from pathlib import Path

import pytest

from configs.attention import AttentionOverrides
from configs.settings import Settings, SettingsError, is_loopback, variable_name
from configs.sources import CONFIG_VARIABLE, load_settings

DOCUMENT = Path(__file__).parents[2] / "docs" / "environment.md"


def test_keys_are_a_comma_separated_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REELWRIGHT_API_KEYS_SHA256", f"{'A' * 64}, {'b' * 64},")
    assert load_settings({}).api_keys_sha256 == ("a" * 64, "b" * 64)


def test_only_what_was_said_overrides_the_models_attention() -> None:
    settings = load_settings({"block_size": "64", "anchor_stride": "auto", "dense_steps": "2"})
    assert settings.attention.model_dump(exclude_none=True) == {
        "block_size": 64,
        "anchor_stride": "auto",
        "dense_steps": 2.0,
    }


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("localhost", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("::", False),
    ],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_listening_to_strangers_takes_a_key_or_a_word() -> None:
    with pytest.raises(SettingsError, match="API key"):
        load_settings({"host": "0.0.0.0"}).check_listening()
    load_settings({"host": "0.0.0.0", "api_keys_sha256": "a" * 64}).check_listening()
    load_settings({"host": "0.0.0.0", "allow_unauthenticated": True}).check_listening()
    load_settings({}).check_listening()


def test_webhook_hosts_are_names_addresses_or_domains() -> None:
    hosts = "Hooks.example.com, *.example.org,localhost,10.0.0.1,::1"
    assert load_settings({"webhook_hosts": hosts}).webhook_hosts == (
        *("hooks.example.com", "*.example.org", "localhost"),
        *("10.0.0.1", "::1"),
    )


@pytest.mark.parametrize(
    "host",
    [
        *("https://example.com", "example.com:443", "example.com/x", "*", "*example.com", "a.*.com"),
        *("-a.com", "a..com", "1.2.3", "256.1.1.1", "a b", "x" * 64 + ".com", "example.com."),
    ],
)
def test_a_webhook_host_that_is_none_is_named(host: str) -> None:
    with pytest.raises(SettingsError, match=r"--webhook-hosts \(REELWRIGHT_WEBHOOK_HOSTS\)") as refused:
        load_settings({"webhook_hosts": f"example.com,{host}"})
    assert repr(host) in str(refused.value)


def secret_of(length: int) -> str:
    """A webhook secret of so many bytes."""
    return "whsec_" + base64.b64encode(b"k" * length).decode()


@pytest.mark.parametrize("length", [24, 32, 64])
def test_a_webhook_secret_is_whsec_and_base64(length: int) -> None:
    found = load_settings({"webhook_secret": secret_of(length)}).webhook_secret
    assert found is not None
    assert found.get_secret_value() == secret_of(length)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://user:secret@host:5432/name",
        "postgres://host/name",
        "postgresql:///name?host=%2Frun%2Fpostgresql",
        "postgresql://user:secret@[::1],other:5433/name?target_session_attrs=read-write",
    ],
)
def test_a_postgresql_url_is_taken(url: str) -> None:
    found = load_settings({"database_url": url}).database_url
    assert found is not None
    assert found.get_secret_value() == url


@pytest.mark.parametrize(
    "url", ["postgresql://u:secret%zz@h/db", "postgres://u:sec@secret@h", "postgresql://u:a/secret@h/db"]
)
def test_a_password_that_is_not_encoded_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(SettingsError, match="must be percent-encoded: %25 for %") as refused:
        load_settings({"database_url": url})
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    ["mysql://user:secret@host/name", "user:secret@host/name", "host=h password=secret", "postgresql:secret"],
)
def test_another_database_is_refused_and_its_password_not_shown(url: str) -> None:
    with pytest.raises(SettingsError, match="postgresql://user:password@host:port/name") as refused:
        load_settings({"database_url": url})
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "secret",
    [
        *(secret_of(23), secret_of(65), secret_of(32).removeprefix("whsec_"), " " + secret_of(32)),
        *("whsec_", "whsec_" + "k" * 31, secret_of(32) + "!", secret_of(32).replace("_", "-")),
    ],
)
def test_a_wrong_webhook_secret_is_refused_and_not_shown(secret: str) -> None:
    with pytest.raises(SettingsError, match="24 to 64 bytes") as refused:
        load_settings({"webhook_secret": secret})
    assert secret.removeprefix("whsec_")[:12] not in str(refused.value) or len(secret) < 12


@pytest.mark.parametrize(
    ("field", "value"),
    [("drain_seconds", "inf"), ("retention_seconds", "inf"), ("preview_seconds", "nan"), ("port", "70000")],
)
def test_a_number_out_of_range_is_refused(field: str, value: str) -> None:
    with pytest.raises(SettingsError, match=variable_name(field)):
        load_settings({field: value})


@pytest.mark.parametrize("field", Settings.model_fields)
def test_every_setting_is_documented_with_its_default(field: str) -> None:
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    (row,) = [line for line in lines if line.startswith(f"| `{variable_name(field)}` |")]
    default = Settings.model_fields[field].default
    is_the_models = field.removeprefix("attention_") in {*AttentionOverrides.model_fields, "step_cache"}
    absent = "the model's" if is_the_models else "none"
    shown = absent if default is None else "none" if default == () else str(default)
    shown = shown.lower() if isinstance(default, bool) else shown
    assert f"| {shown} |" in row.replace("`", "")


def test_settings_of_the_orders_of_anchor_local() -> None:
    settings = load_settings(
        {
            "token_order": "tile",
            "tile_thw": "3x15x26",
            "anchor_rotation": "true",
            "attention_precision": "fp8",
        }
    )
    said = settings.attention.model_dump(exclude_none=True)
    assert said == {
        "token_order": "tile",
        "tile_thw": (3, 15, 26),
        "anchor_rotation": True,
        "precision": "fp8",
    }
    assert load_settings({"tile_thw": "auto"}).attention.tile_thw == "auto"
    for wrong in ("3x15", "3,15,26", "0x1x1"):
        with pytest.raises(SettingsError, match=r"REELWRIGHT_TILE_THW|--tile-thw"):
            load_settings({"tile_thw": wrong})


def test_every_row_of_the_document_is_a_setting() -> None:
    rows = re.findall(r"^\| `(REELWRIGHT_\w+)` \|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(
        {CONFIG_VARIABLE} | {variable_name(field) for field in Settings.model_fields}
    )
