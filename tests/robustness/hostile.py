"""Thousands of hostile requests against a real server, and what is left of it.

    python -m tests.robustness.hostile --count 10000 --json hostile.json

Knows: how to start a server in a watched folder, and what must hold afterwards. Does not know: the attacks.
"""

import argparse
import json
import os
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from benchmarks.processes import memory_bytes
from tests.robustness.attacks import attack
from tests.robustness.client import Verdict, send
from tests.server.running_server import RunningServer
from tests.tiny_wan import tiny_preset, write_tiny_wan

CLIENTS = 16
MAX_QUEUED_JOBS = 20
UNHANDLED = ("request_error", "process_crashed", "thread_crashed", "worker_died", "supervisor_died")


@dataclass(frozen=True)
class Report:
    """What a run came to. ``faults`` is empty where the server did nothing wrong."""

    count: int
    seed: int
    seconds: float
    statuses: dict[str, int]
    kinds: dict[str, int]
    api_rss_bytes_before: int
    api_rss_bytes_after: int
    api_rss_bytes_peak: int
    faults: list[str]


def run(folder: Path, model_file: Path, count: int, seed: int) -> Report:
    """Start a server in ``folder``, attack it, and look at what it did."""
    home, temporary = folder / "home", folder / "temporary"
    home.mkdir(parents=True)
    temporary.mkdir()
    (home / "canary").write_text("untouched")
    environment = {"HOME": str(home), "TMPDIR": str(temporary)}
    data = folder / "deep" / "data"
    data.parent.mkdir()
    flags = ("--max-queued-jobs", str(MAX_QUEUED_JOBS), "--preview-seconds", "0")
    with RunningServer(data, model_file, *flags, env=environment) as server:
        server.wait_until_ready()
        known = [server.wait_for_job(server.submit(num_inference_steps=1)["id"])["id"]]
        outside, pid, before = _outside(folder, server), server.pid, memory_bytes(server.pid)
        started = time.monotonic()
        statuses, kinds, faults = _attack(server, count, seed, known)
        seconds = time.monotonic() - started
        faults += _aftermath(server, pid)
        changed = sorted(_outside(folder, server) ^ outside)
        faults += [f"outside the data folder: {path}" for path, _ in changed]
        faults += [f"no job's file: {path}" for path in _strangers(data)]
        faults += [f"logged: {line}" for line in _bad_log_lines(server)]
        return Report(
            count=count,
            seed=seed,
            seconds=round(seconds, 1),
            statuses=dict(sorted(statuses.items())),
            kinds=dict(sorted(kinds.items())),
            api_rss_bytes_before=before,
            api_rss_bytes_after=memory_bytes(pid),
            api_rss_bytes_peak=memory_bytes(pid, "VmHWM"),
            faults=faults,
        )


def _attack(
    server: RunningServer, count: int, seed: int, known: list[str]
) -> tuple[Counter[str], Counter[str], list[str]]:
    statuses: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    faults: list[str] = []

    def one(number: int) -> tuple[str, Verdict]:
        made = attack(seed, number, known)
        return made.kind, send(server.port, made)

    with ThreadPoolExecutor(CLIENTS) as pool:
        for number, (kind, verdict) in enumerate(pool.map(one, range(count))):
            kinds[kind] += 1
            statuses[str(verdict.status or "none")] += 1
            if verdict.fault is not None:
                faults.append(f"attack {number} ({kind}): {verdict.fault}")
    return statuses, kinds, faults


def _aftermath(server: RunningServer, pid: int) -> list[str]:
    """Whether it is the same process, answers, and makes a video once what was queued is out of the way."""
    faults = []
    if server.client.get("/health/live").status_code != 200 or server.pid != pid:
        faults.append("the API process is not what it was")
    for status in ("queued", "in_progress"):
        page = server.client.get("/v1/videos", params={"status": status, "limit": 100}).json()["data"]
        for job in page:
            server.client.post(f"/v1/videos/{job['id']}/cancel")
    job = server.wait_for_job(server.submit()["id"])
    if job["status"] != "completed":
        faults.append(f"a normal job afterwards: {job['status']}, {job['error']}")
    return faults


def _outside(folder: Path, server: RunningServer) -> set[tuple[str, int]]:
    """Every file beside the data folder and the log, with its size."""
    found = (path for path in folder.rglob("*") if server.data_dir not in (path, *path.parents))
    return {
        (str(path), path.stat().st_size if path.is_file() else -1) for path in found if path != server.log
    }


def _strangers(data: Path) -> list[str]:
    with closing(sqlite3.connect(data / "jobs.sqlite3")) as database:
        known = {str(row[0]) for row in database.execute("SELECT id FROM jobs")}
    return [str(path) for path in (data / "videos").iterdir() if path.name not in known]


def _bad_log_lines(server: RunningServer) -> list[str]:
    """Lines that tell of an error nobody handled, or that are no JSON."""
    found = []
    for text in server.log.read_text(errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            found.append(text[:500])
            continue
        if line["event"] in UNHANDLED or "exception" in line:
            found.append(f"{line['event'].strip()} {line.get('exception', '')[-800:]}")
    return found


def write_tiny_model(folder: Path) -> Path:
    """The tiny model as a preset file, for ``--model``."""
    preset = tiny_preset(write_tiny_wan(folder / "tiny"))
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(preset.model_dump(mode="json")), encoding="utf-8")
    return path


def main() -> int:
    """Run by hand; exit code 1 when the server did anything wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_tiny_model(folder)
        report = run(folder / "watched", model, options.count, options.seed)
    text = json.dumps(asdict(report), indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + os.linesep, encoding="utf-8")
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
