"""Log lines: one format for all that a process says, bound to jobs and requests, and no prompt in them."""

import json
import subprocess
import sys
from typing import Any

import pytest

HEAD = """
import asyncio, logging, sys, threading, warnings
from pydantic import BaseModel
from configs.settings import Settings
from server import logs
logs.configure(Settings(log_format="json"{settings}), "worker")
log = logs.get_logger()
class Model(BaseModel):
    number: int
def quote():
    Model(number="an unmistakable heptagon")
"""


def lines_of(script: str, settings: str = "") -> list[dict[str, Any]]:
    """What a process that runs the script writes to standard error, each line read as JSON."""
    ended = subprocess.run(
        [sys.executable, "-c", HEAD.replace("{settings}", settings) + script],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": ""},
    )
    assert ended.stdout == ""
    return [json.loads(line) for line in ended.stderr.splitlines()]


def test_each_line_has_level_time_and_process() -> None:
    (line,) = lines_of('log.info("started", port=1, text="two\\nlines")')
    assert line.pop("timestamp").endswith("Z")
    assert line == {"event": "started", "level": "info", "process": "worker", "port": 1, "text": "two\nlines"}


def test_level_is_the_least_severe_one_written() -> None:
    script = 'log.info("a"); log.warning("b"); logging.getLogger("x").warning("c"); logging.error("d")'
    assert [line["event"] for line in lines_of(script, ', log_level="error"')] == ["d"]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (
            'logging.getLogger("uvicorn.error").error("no %s", "port")',
            {"event": "no port", "level": "error", "logger": "uvicorn.error"},
        ),
        ('logging.getLogger("uvicorn.error").info("quiet")', None),
        (
            'warnings.warn("old\\nthing", FutureWarning)',
            {"event": "python_warning", "category": "FutureWarning", "message": "old\nthing"},
        ),
        ("raise KeyError(7)", {"event": "process_crashed", "level": "critical"}),
        (
            "t = threading.Thread(target=lambda: 1 / 0, name='job'); t.start(); t.join()",
            {"event": "thread_crashed", "thread": "job"},
        ),
        ("with logs.crash_as_line():\n    1 / 0", {"event": "process_crashed", "level": "error"}),
        (
            "asyncio.run(asyncio.sleep(0))\n"
            "import gc\n"
            "async def f():\n    1 / 0\n"
            "async def main():\n    t = asyncio.create_task(f())\n    await asyncio.sleep(0.01)\n    del t\n"
            "asyncio.run(main()); gc.collect()",
            {"event": "Task exception was never retrieved", "logger": "asyncio"},
        ),
    ],
)
def test_what_others_say_has_the_same_format(script: str, expected: dict[str, Any] | None) -> None:
    found = lines_of(script)
    assert len(found) == (0 if expected is None else 1)
    for line in found:
        assert expected is not None
        assert expected.items() <= line.items()
        assert line["process"] == "worker"


def test_a_library_with_a_logging_of_its_own_is_brought_in_line() -> None:
    script = (
        'own = logging.getLogger("diffusers"); own.addHandler(logging.StreamHandler())\n'
        "own.propagate = False\n"
        'logs.adopt_libraries(); logging.getLogger("diffusers.models").warning("said")'
    )
    (line,) = lines_of(script)
    assert (line["event"], line["logger"]) == ("said", "diffusers.models")


def test_a_job_is_bound_to_every_line_of_its_thread_and_to_no_other() -> None:
    script = """
def run():
    with logs.job_lines("video_1", 2):
        log.info("a"); logging.warning("b"); warnings.warn("c")
t = threading.Thread(target=run); t.start(); t.join()
log.info("d")
with logs.request_lines("r1"):
    log.info("e")
"""
    lines = lines_of(script)
    assert [(line.get("job"), line.get("attempt")) for line in lines] == [("video_1", 2)] * 3 + [
        (None, None)
    ] * 2
    assert [line.get("request") for line in lines] == [None] * 4 + ["r1"]


SAY_IT = """
prompt = "an unmistakable heptagon\\n\\u00e4"
with logs.job_lines("video_1", 1, prompt, None):
    log.info("job_started", prompt="an unmistakable heptagon", negative_prompt="heptagon")
    log.error("x", message=f"got '{prompt}' and {prompt!r}")
    logging.error(f"tokenizer: {prompt}")
    try:
        raise ValueError(prompt)
    except ValueError:
        log.exception("y")
try:
    try:
        quote()
    except ValueError as error:
        raise RuntimeError(f"wrapped {error}") from error
except RuntimeError:
    log.exception("z")
    logging.exception("w")
quote()
"""


def test_no_line_holds_a_prompt() -> None:
    lines = lines_of(SAY_IT)
    assert [line["event"] for line in lines] == [
        *("job_started", "x", "tokenizer: [prompt]", "y", "z", "w", "process_crashed"),
    ]
    assert lines[1]["message"] == "got '[prompt]' and '[prompt]'"
    assert lines[3]["exception"].endswith("ValueError: [prompt]")
    for line in lines[4:6]:
        assert "in quote" in line["exception"] or 'File "<string>"' in line["exception"]
        assert "RuntimeError (its text may quote a request)" in line["exception"]
    assert "heptagon" not in json.dumps(lines)


def test_hiding_a_prompt_leaves_the_rest_of_the_line() -> None:
    script = """
with logs.job_lines("video_2026", 1, "2026", "0"):
    log.error("x", message="got 2026 and 0", steps=2026, model="2026")
"""
    (line,) = lines_of(script)
    assert line["timestamp"].startswith("20")
    assert "[prompt]" not in line["timestamp"]
    assert (line["job"], line["message"], line["model"]) == ("video_2026", "got [prompt] and 0", "2026")


def test_prompts_are_written_where_asked_for() -> None:
    lines = lines_of(SAY_IT, ", log_prompts=True")
    assert lines[0]["prompt"] == "an unmistakable heptagon"
    assert "wrapped" in lines[4]["exception"]
