"""The command line: flags, exit codes and errors of one line."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from configs.model_preset import ModelPreset
from configs.settings import Settings, flag_name, variable_name
from pipelines import read_manifest
from pipelines.mp4 import write_mp4
from server.cli import run_command
from server.version import package_version
from tests.pipelines.clips import decoded_frames

CPU = ("--device", "cpu", "--dtype", "float32")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "server.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "200"},
    )


def exit_code(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The command in this process, which has torch already."""
    monkeypatch.setattr(sys, "argv", ["reelwright", *arguments])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        run_command()
    return int(ended.value.code or 0)


def test_the_version() -> None:
    ended = run("--version")
    assert (ended.returncode, ended.stdout.strip()) == (0, f"reelwright {package_version()}")


def test_every_setting_is_a_flag_of_serve_with_its_variable() -> None:
    shown = run("serve", "--help").stdout
    for field in Settings.model_fields:
        assert flag_name(field) in shown
        assert variable_name(field) in shown


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        (["serve", "--port", "x"], {}, "--port (REELWRIGHT_PORT)"),
        (["serve"], {"REELWRIGHT_PORT": "99999"}, "--port (REELWRIGHT_PORT)"),
        (["serve"], {"REELWRIGHT_PROT": "9"}, "did you mean REELWRIGHT_PORT"),
        (["serve", "--host", "0.0.0.0"], {}, "--allow-unauthenticated"),
        (["serve", "--host", "no.such.host.invalid"], {}, "no.such.host.invalid"),
        (["serve", "--model", "nothing"], {}, "reelwright-shapes"),
        (["serve", "--model", "~no-such-user/model"], {}, "no such user"),
        (["serve", "--data-dir", "~no-such-user/data"], {}, "no such user"),
        (["serve", "--device", "gpu"], {}, "cuda:<index>"),
        (["serve", "--gpus", "0"], {}, "--gpus (REELWRIGHT_GPUS)"),
        (["serve", "--gpus", "2", "--attention-backend", "block_topk"], {}, "--gpus 2: attention.backend"),
        (["serve", "--dense-steps", "inf"], {}, "finite"),
        (["serve", "--attention-backend", "fast"], {}, "'anchor_local'"),
        (["serve", "--attention-backend", "dense", "--block-size", "64"], {}, "block_size has no effect"),
        (["serve", "--anchor-stride", "4", "--anchor-offset", "4"], {}, "below anchor_stride"),
        (["serve", "--prot", "1"], {}, "--port"),
        (["serve", "--config", "/no/such/file.yaml"], {}, "/no/such/file.yaml"),
        (["generate", "x", "-o", "x.mp4"], {"REELWRIGHT_CONFIG": "/no/such.yaml"}, "/no/such.yaml"),
        (["generate", "x"], {}, "--output"),
        (["generate", "x", "-o", "x.avi"], {}, ".mp4"),
        (["generate", "x", "-o", "/no/such/folder/x.mp4"], {}, "existing folder"),
        (["generate", "x", "-o", "/proc/x.mp4"], {}, "cannot be written"),
        (["generate", "x", "-o", f"{'x' * 252}.mp4"], {}, "cannot be written"),
        (["generate", " ", "-o", "x.mp4"], {}, "blank"),
        (["generate", "-o", "x.mp4"], {}, "PROMPT, or --manifest"),
        (["generate", "x", "-o", "x.mp4", "--manifest", "y.json"], {}, "PROMPT cannot go with --manifest"),
        (["generate", "-o", "x.mp4", "--manifest", "y.json", "--steps", "3"], {}, "--steps cannot go with"),
        (["generate", "-o", "x.mp4", "--manifest", "y.json", "--window", "1"], {}, "--window cannot go with"),
        (
            ["generate", "-o", "x.mp4", "--manifest", "y.json", "--step-cache", "off"],
            {},
            "--step-cache cannot go with",
        ),
        (["generate", "-o", "x.mp4", "--manifest", "/no/such.json"], {}, "such.json cannot be read: No such"),
        (["generate", "-o", "x.mp4", "--manifest", "/no/such.mp4"], {}, "such.mp4 is no file that ffmpeg"),
        (["generate", "-o", "x.mp4", "--manifest", "y.txt"], {}, "must end in .json or .mp4"),
        (["generate", "x", "-o", "x.mp4", "--model", "./nowhere/model"], {}, "no folder"),
        (["generate", "x", "-o", "x.mp4", "--size", "100x100"], {}, "nearest valid"),
        (["generate", "x", "-o", "x.mp4", "--size", "big"], {}, "size"),
        (["generate", "x", "-o", "x.mp4", "--num-frames", "10"], {}, "9 or 13"),
        (["generate", "x", "-o", "x.mp4", "--seed", "-1"], {}, "seed"),
        (["generate", "x", "-o", "x.mp4"], {"REELWRIGHT_BLOCK_SIZE": "0"}, "REELWRIGHT_BLOCK_SIZE"),
    ],
)
def test_impossible_wishes_end_with_2_and_one_line(
    arguments: list[str],
    environment: dict[str, str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert exit_code(monkeypatch, *arguments) == 2
    assert expected in capsys.readouterr().err


def test_generate_writes_the_video_and_says_what_ran(
    model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "[red]out.mp4"
    output.write_bytes(b"an old file")
    code = exit_code(
        monkeypatch,
        *("generate", "a red circle", "-o", str(output), "--model", str(model_file), *CPU),
        *("--seed", "5", "--steps", "4", "--seconds", "1", "--size", "64x64"),
        *("--block-size", "16", "--anchor-stride", "5"),
    )
    said = " ".join(capsys.readouterr().out.split())
    assert code == 0
    assert output.read_bytes()[4:8] == b"ftyp"
    for part in (str(output), "64x64, 9 frames at 8 fps", "seed 5", "tiny-wan on cpu in float32"):
        assert part in said
    assert "anchor_local (torch), density 0." in said
    assert "4 steps of 0." in said
    assert "MiB at peak" in said


def test_a_manifest_makes_the_same_clip_again_from_either_file(
    model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third = (tmp_path / f"{name}.mp4" for name in ("first", "second", "third"))
    model = ("--model", str(model_file), *CPU)
    wish = ("a red circle", "--seed", "7", "--steps", "2", "--size", "64x64", "--num-frames", "9")
    assert exit_code(monkeypatch, "generate", *wish, "-o", str(first), "--block-size", "16", *model) == 0
    # Not the model's default and not in the manifest's way, as over HTTP: a setting is no wish for a clip.
    monkeypatch.setenv("REELWRIGHT_BLOCK_SIZE", "32")
    assert exit_code(monkeypatch, "generate", "-o", str(second), "--manifest", str(first), *model) == 0
    manifest = read_manifest(first)
    assert manifest is not None
    (tmp_path / "first.json").write_text(manifest.model_dump_json())
    json = str(tmp_path / "first.json")
    assert exit_code(monkeypatch, "generate", "-o", str(third), "--manifest", json, *model) == 0
    frames = decoded_frames(first, 64, 64)
    assert len(frames) == 9
    for again in (second, third):
        assert np.array_equal(decoded_frames(again, 64, 64), frames)
        assert read_manifest(again) == manifest
    capsys.readouterr()
    assert exit_code(monkeypatch, "generate", "-o", str(third), "--manifest", json, *CPU) == 2
    assert "the manifest is of model 'tiny-wan'; served here: reelwright-shapes" in capsys.readouterr().err


def test_a_file_without_a_manifest_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    video, text = tmp_path / "a.mp4", tmp_path / "a.json"
    write_mp4(np.zeros((2, 16, 16, 3), np.uint8), video, 8)
    text.write_text('{"version": 1}')
    for path, expected in ((video, "a.mp4 holds no manifest"), (text, "a.json: parameters is required")):
        wish = ("generate", "-o", str(tmp_path / "x.mp4"), "--manifest", str(path))
        assert exit_code(monkeypatch, *wish) == 2
        assert expected in capsys.readouterr().err


def test_generate_says_in_one_line_why_a_model_does_not_load(
    preset: ModelPreset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(preset.source, broken)
    (broken / "vae" / "config.json").write_text("{}")
    output = tmp_path / "out.mp4"
    wish = (
        "generate",
        "x",
        "-o",
        str(output),
        "--model",
        str(broken),
        "--size",
        "64x64",
        "--num-frames",
        "9",
    )
    assert exit_code(monkeypatch, *wish, *CPU) == 1
    said = capsys.readouterr().err.strip().splitlines()
    assert "model_load_failed" in said[-1]
    assert not output.exists()


def test_an_interrupted_generate_leaves_nothing(model_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.mp4"
    model = ("--model", str(model_file), "--device", "cpu", "--dtype", "float32")
    command = (
        sys.executable,
        "-m",
        "server.cli",
        "generate",
        "x",
        "-o",
        str(output),
        "--steps",
        "1000",
        *model,
    )
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        maps = Path(f"/proc/{process.pid}/maps")
        while "libtorch" not in maps.read_text():  # by then it listens for the signal
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=120)[1]
    assert process.returncode == 130
    assert "interrupted; nothing was written" in said
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []
