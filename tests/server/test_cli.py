"""The command line: flags, exit codes and errors of one line."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from configs.settings import Settings, flag_name, variable_name
from server.version import package_version


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "server.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1", **environment},
    )


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
        (["serve", "--attention-backend", "fast"], {}, "'anchor_local'"),
        (["serve", "--attention-backend", "dense", "--block-size", "64"], {}, "block_size has no effect"),
        (["serve", "--anchor-stride", "4", "--anchor-offset", "4"], {}, "below anchor_stride"),
        (["serve", "--prot", "1"], {}, "--port"),
        (["generate", "x"], {}, "--output"),
        (["generate", "x", "-o", "x.avi"], {}, ".mp4"),
        (["generate", "x", "-o", "/no/such/folder/x.mp4"], {}, "existing folder"),
        (["generate", " ", "-o", "x.mp4"], {}, "blank"),
        (["generate", "x", "-o", "x.mp4", "--size", "100x100"], {}, "nearest valid"),
        (["generate", "x", "-o", "x.mp4", "--size", "big"], {}, "size"),
        (["generate", "x", "-o", "x.mp4", "--num-frames", "10"], {}, "9 or 13"),
        (["generate", "x", "-o", "x.mp4", "--seed", "-1"], {}, "seed"),
        (["generate", "x", "-o", "x.mp4"], {"REELWRIGHT_BLOCK_SIZE": "0"}, "REELWRIGHT_BLOCK_SIZE"),
    ],
)
def test_impossible_wishes_end_with_2_and_one_line(
    arguments: list[str], environment: dict[str, str], expected: str
) -> None:
    ended = run(*arguments, **environment)
    assert ended.returncode == 2
    assert expected in ended.stderr
    assert "Traceback" not in ended.stderr


def test_generate_writes_the_video_and_says_what_ran(model_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "[red]out.mp4"
    output.write_bytes(b"an old file")
    model = ("--model", str(model_file), "--device", "cpu", "--dtype", "float32")
    ended = run(
        *("generate", "a red circle", "-o", str(output), *model),
        *("--seed", "5", "--steps", "4", "--seconds", "1", "--size", "64x64"),
        *("--block-size", "16", "--anchor-stride", "5"),
    )
    assert ended.returncode == 0, ended.stderr
    assert output.read_bytes()[4:8] == b"ftyp"
    said = " ".join(ended.stdout.split())
    for part in (str(output), "64x64, 9 frames at 8 fps", "seed 5", "tiny-wan on cpu in float32"):
        assert part in said
    assert "anchor_local (torch), density 0." in said
    assert "4 steps of 0." in said
    assert "MiB at peak" in said


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


def test_generate_says_in_one_line_why_a_model_does_not_load(tmp_path: Path) -> None:
    preset = tmp_path / "gone.yaml"
    preset.write_text("{name: gone, source: /no/such/folder}")
    ended = run("generate", "x", "-o", str(tmp_path / "x.mp4"), "--model", str(preset), "--device", "cpu")
    assert ended.returncode == 1
    assert "model_load_failed" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "x.mp4").exists()
