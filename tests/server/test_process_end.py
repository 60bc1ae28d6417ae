"""What a process leaves with: its exit code, what it printed, and no thread that aborts it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.running_server import RunningServer

MODEL = "reelwright-shapes"
HELD = "tests.server.held_threads"


def python(code: str, stdout: int = subprocess.PIPE) -> tuple[int, str, str]:
    """Exit code, output and errors of a process that is the code's ``run``."""
    program = f"from server.process_end import run_to_end\n{code}\nrun_to_end(run)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONUNBUFFERED": ""},
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ("return None", (0, "")),
        ("raise SystemExit", (0, "")),
        ("raise SystemExit(0)", (0, "")),
        ("raise SystemExit(75)", (75, "")),
        ("raise SystemExit('why')", (1, "why\n")),
    ],
)
def test_the_exit_code_is_what_python_gives(last: str, expected: tuple[int, str]) -> None:
    code = f"def run():\n    print('said', end='')\n    {last}"
    assert python(code) == (expected[0], "said", expected[1])


def test_an_error_is_shown_by_the_hook() -> None:
    status, _, errors = python("def run(): raise ValueError('lost')")
    assert status == 1
    assert "Traceback" in errors
    assert "ValueError: lost" in errors
    hooked = (
        "import sys\nsys.excepthook = lambda *error: print(error[1])\ndef run(): raise ValueError('lost')"
    )
    assert python(hooked) == (1, "lost\n", "")


def test_threads_are_waited_for_and_exit_functions_run() -> None:
    status, output, _ = python(
        "import atexit, threading, time\n"
        "def late():\n    time.sleep(0.3); print('thread')\n"
        "def run():\n    atexit.register(print, 'exit function'); threading.Thread(target=late).start()"
    )
    assert (status, output) == (0, "thread\nexit function\n")


def test_output_that_cannot_be_written_is_an_error() -> None:
    with Path("/dev/full").open("wb") as full:
        status, _, _ = python("def run(): print('lost')", full.fileno())
    assert status == 120


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    """With a store whose threads are held up as they hand over an answer."""
    store = tmp_path / "store"
    store.mkdir()
    server = RunningServer(tmp_path / "first", MODEL, "--storage-url", f"file://{store}")
    server._command[server._command.index("server.cli")] = HELD
    with server:
        yield server


def test_a_thread_of_the_store_does_not_abort_the_process(server: RunningServer, tmp_path: Path) -> None:
    command = [str(tmp_path / "second") if part.endswith("/first") else part for part in server._command]
    command += ["--port", "0"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "the store belongs to the database" in refused.stderr
    server.wait_until_ready()
    server.signal(signal.SIGTERM)
    assert server.wait_for_end() == 0
    assert "supervisor_died" not in server.log.read_text()
