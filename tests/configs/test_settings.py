"""Settings: where values come from, and what is refused."""

from pathlib import Path

import pytest

from configs.settings import Settings, SettingsError, is_loopback, load_settings, variable_name

DOCUMENT = Path(__file__).parents[2] / "docs" / "environment.md"


def test_flags_win_over_the_environment_and_that_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REELWRIGHT_PORT", "1111")
    monkeypatch.setenv("REELWRIGHT_BLOCK_SIZE", "64")
    settings = load_settings({"port": "2222", "block_size": None})
    assert (settings.port, settings.block_size, settings.host) == (2222, 64, "127.0.0.1")


def test_an_empty_variable_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REELWRIGHT_ATTENTION_BACKEND", "")
    assert load_settings({}).attention_backend is None


def test_a_variable_that_is_no_setting_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REELWRIGHT_ATTENTON_BACKEND", "dense")
    with pytest.raises(SettingsError, match="REELWRIGHT_ATTENTION_BACKEND"):
        load_settings({})


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


@pytest.mark.parametrize("field", Settings.model_fields)
def test_every_setting_is_documented_with_its_default(field: str) -> None:
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    (row,) = [line for line in lines if line.startswith(f"| `{variable_name(field)}` |")]
    default = Settings.model_fields[field].default
    shown = {None: "the model's", (): "none", True: "true", False: "false"}.get(default, str(default))
    assert f"| {shown} |" in row.replace("`", "")
