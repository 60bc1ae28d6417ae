"""Sources of settings: their order, their errors, and what is remembered of them."""

from pathlib import Path

import pytest

from configs.settings import Settings, SettingsError
from configs.sources import Origin, load_settings, load_sourced_settings

# Nine in a list, and nine of the list before in each further one: 9**9 in the end.
ALIASES_WITHOUT_END = "webhook_hosts: [" + "&0 [" + "x, " * 9 + "]"
ALIASES_WITHOUT_END += "".join(f", &{n} [" + f"*{n - 1}, " * 9 + "]" for n in range(1, 9)) + "]"
MANY_KEYS = "\n".join(f"k{n}: 1" for n in range(20_000))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A configuration file."""
    path = tmp_path / "reelwright.yaml"
    path.write_text(
        "host: 127.0.0.2\nport: 3333\nblock_size: 32\ndata_dir: ~/videos\n"
        'webhook_hosts: [hooks.example.com, "*.example.org"]\nretention_seconds: null\nopen_root: true\n'
    )
    return path


def test_flags_win_over_the_environment_that_over_the_file_and_that_over_the_default(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REELWRIGHT_PORT", "1111")
    monkeypatch.setenv("REELWRIGHT_BLOCK_SIZE", "64")
    monkeypatch.setenv("REELWRIGHT_LOG_LEVEL", "debug")
    sourced = load_sourced_settings({"port": "2222", "block_size": None, "open_root": False}, file)
    settings, origins = sourced.settings, sourced.origins
    assert (settings.port, settings.block_size, settings.host) == (2222, 64, "127.0.0.2")
    assert (settings.log_level, settings.model, settings.open_root) == ("debug", "reelwright-shapes", False)
    assert settings.webhook_hosts == ("hooks.example.com", "*.example.org")
    assert settings.data_dir == Path.home() / "videos"
    assert origins["port"] == Origin("flag", "--port")
    assert origins["open_root"] == Origin("flag", "--open-root")
    assert origins["block_size"] == Origin("environment", "REELWRIGHT_BLOCK_SIZE")
    assert origins["host"] == Origin("file", f"{file}:host")
    assert origins["retention_seconds"] == Origin("file", f"{file}:retention_seconds")
    assert origins["model"] == Origin("default")
    assert set(origins) == set(Settings.model_fields)


def test_the_file_is_named_by_flag_or_variable(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("port: 4444\n")
    monkeypatch.setenv("REELWRIGHT_CONFIG", str(file))
    assert load_settings({}).port == 3333
    assert load_settings({}, other).port == 4444
    monkeypatch.setenv("REELWRIGHT_CONFIG", "")
    assert load_settings({}).port == 8000


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# port: 1\n")
    assert load_settings({}, tmp_path / "empty.yaml") == load_settings({})


def test_an_empty_variable_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REELWRIGHT_ATTENTION_BACKEND", "")
    sourced = load_sourced_settings({})
    assert sourced.settings.attention_backend is None
    assert sourced.origins["attention_backend"] == Origin("default")


def test_a_variable_that_is_no_setting_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REELWRIGHT_ATTENTON_BACKEND", "dense")
    with pytest.raises(SettingsError, match="REELWRIGHT_ATTENTION_BACKEND"):
        load_settings({})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("drain_secs: 3", "drain_secs is not a setting; did you mean drain_seconds?"),
        ("1: 2", "1 is not a setting"),
        ("config: x.yaml", "config is not a setting"),
        ('port: "8000"', ":port: Input should be a valid integer"),
        ("port: true", ":port: Input should be a valid integer"),
        ("port:", ":port: Input should be a valid integer"),
        ("port: 99999", ":port: Input should be less than or equal to 65535"),
        ("drain_seconds: .inf", ":drain_seconds: Input should be a finite number"),
        ("open_root: 1", ":open_root: Input should be a valid boolean"),
        ("webhook_hosts: a.example.com", ":webhook_hosts: Input should be a valid array"),
        ("webhook_hosts: [1]", ":webhook_hosts: Input should be a valid string"),
        ("webhook_hosts: [http://a]", ":webhook_hosts: 'http://a' is not a host name"),
        ("host: 2020-01-01", ":host: no setting is a date"),
        ("block_size: small", ":block_size: Input should be a valid integer or Input should be 'auto'"),
        ("device: gpu", ":device: 'gpu' is not one of"),
        ("webhook_secret: 12", ":webhook_secret: Input should be a valid string"),
        ("port: 1\nport: 2", "port is given more than once"),
        ("- port", "must hold lines of the form name: value"),
        ("port", "must hold lines of the form name: value"),
        ("[", "cannot be read"),
        ("\x00", "cannot be read"),
        ("? [a]\n: b", "cannot be read"),
        ("a: !!python/object/apply:os.getcwd []", "cannot be read"),
        ("[" * 5000, "cannot be read"),
        ("port: " + "9" * 5000, "4300 digits"),
        ("port: 0x" + "f" * 5000, ":port: Exceeds the limit (4300 digits)"),
        ("webhook_hosts: &a [*a]", "write the value out"),
        (ALIASES_WITHOUT_END, "write the value out"),
        (MANY_KEYS, "k0 is not a setting"),
    ],
    ids=lambda text: text[:40],
)
def test_a_wrong_file_is_one_line_that_names_file_and_key(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError) as refused:
        load_settings({"port": "1"}, path)
    said = str(refused.value)
    assert expected in said
    assert str(path) in said
    assert "\n" not in said


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.yaml", tmp_path, Path("~no-such-user/x.yaml")):
        with pytest.raises(SettingsError, match=f"{path} cannot be read"):
            load_settings({}, path)
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"host: \xff\xfe\n")
    with pytest.raises(SettingsError, match="cannot be read"):
        load_settings({}, latin)


def test_a_wrong_value_names_its_own_source(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REELWRIGHT_DEVICE", "gpu")
    file.write_text("anchor_offset: -1\n")
    with pytest.raises(SettingsError, match=f"{file}:anchor_offset"):
        load_settings({}, file)
    file.write_text("webhook_hosts: ['*']\n")
    with pytest.raises(SettingsError, match=r"--device \(REELWRIGHT_DEVICE\).*; .*:webhook_hosts") as refused:
        load_settings({}, file)
    assert "REELWRIGHT_WEBHOOK_HOSTS" not in str(refused.value)
