"""``reelwright config show``: every setting, its origin, and no secret."""

import json
from pathlib import Path

import pytest

from configs.settings import Settings
from tests.server.test_cli import exit_code

SECRET = "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIz"
DIGEST = "0123456789abcdef" * 4


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration file and variables, with secrets in both."""
    path = tmp_path / "reelwright.yaml"
    path.write_text(f"webhook_secret: {SECRET}\nport: 9001\nwebhook_hosts: [a.example.com, localhost]\n")
    monkeypatch.setenv("REELWRIGHT_API_KEYS_SHA256", DIGEST)
    return path


def test_each_setting_has_a_line_with_value_and_origin(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(monkeypatch, "config", "show", "--config", str(file), "--no-open-metrics") == 0
    text = capsys.readouterr().out
    lines = [line.split() for line in text.splitlines()]
    assert [line[0] for line in lines] == list(Settings.model_fields)
    for expected in (
        ["host", "127.0.0.1", "default"],
        ["port", "9001", "file", f"{file}:port"],
        ["open_metrics", "false", "flag", "--open-metrics"],
        ["webhook_hosts", "a.example.com,", "localhost", "file", f"{file}:webhook_hosts"],
        ["webhook_secret", "********", "file", f"{file}:webhook_secret"],
        ["api_keys_sha256", "01234567...", "environment", "REELWRIGHT_API_KEYS_SHA256"],
        ["max_jobs_per_key", "-", "default"],
    ):
        assert expected in lines
    assert SECRET not in text
    assert DIGEST not in text


def test_json_holds_the_same(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(monkeypatch, "config", "show", "--json", "--config", str(file)) == 0
    text = capsys.readouterr().out
    report = json.loads(text)
    assert list(report) == list(Settings.model_fields)
    assert report["port"] == {"value": 9001, "source": "file", "name": f"{file}:port"}
    assert report["max_jobs_per_key"] == {"value": None, "source": "default", "name": None}
    assert report["webhook_secret"]["value"] == "********"
    assert report["api_keys_sha256"]["value"] == ["01234567..."]
    assert SECRET not in text
    assert DIGEST not in text


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://user:p%40ss@host:5432/jobs", "postgresql://user:********@host:5432/jobs"),
        ("postgresql://user@host/jobs", "postgresql://user@host/jobs"),
        (
            "postgresql:///jobs?host=%2Frun&password=p%40ss",
            "postgresql:///jobs?host=%2Frun&password=********",
        ),
        ("postgres://h/jobs?sslpassword=p%40ss&a=b", "postgres://h/jobs?sslpassword=********&a=b"),
    ],
)
def test_the_database_is_shown_without_its_password(
    url: str, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REELWRIGHT_DATABASE_URL", url)
    assert exit_code(monkeypatch, "config", "show", "--json") == 0
    text = capsys.readouterr().out
    assert json.loads(text)["database_url"]["value"] == shown
    assert "p%40ss" not in text


def test_what_is_wrong_is_not_shown_but_refused(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("prot: 1\n")
    assert exit_code(monkeypatch, "config", "show", "--config", str(file)) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert f"{file}: prot is not a setting; did you mean port?" in output.err
