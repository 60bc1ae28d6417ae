"""Many small jobs through one server: does memory stay where it is, and is every file somebody's?

    python -m benchmarks.soak --jobs 500 --json benchmarks/results/soak.json

The smallest clips of the bundled model. One job is always waiting, so jobs overlap as they do under load.
Memory is read at the end of each job; the medians of the first and the last tenth are compared.
"""

import argparse
import json
import sqlite3
import statistics
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.processes import memory_bytes
from configs.model_preset import BUNDLED_MODEL, find_model
from server.files import DataFolder
from tests.server.running_server import RunningServer

STEPS = 2
FRAMES = 5
ALLOWED_GROWTH = 0.05
# The first jobs load code and fill caches.
WARM_UP_JOBS = 5


@dataclass(frozen=True, slots=True)
class Growth:
    """Median memory of a process over the first and the last tenth of the jobs."""

    first_bytes: int
    last_bytes: int
    growth: float


@dataclass(frozen=True, slots=True)
class Report:
    """What a run came to."""

    jobs: int
    model: str
    clip: str
    seconds: float
    statuses: dict[str, int]
    memory: dict[str, Growth]
    unknown_files: list[str]
    missing_files: list[str]

    @property
    def is_good(self) -> bool:
        """Memory flat within 5%, every job completed, every file known and there."""
        is_flat = all(abs(found.growth) <= ALLOWED_GROWTH for found in self.memory.values())
        return is_flat and set(self.statuses) == {"completed"} and not self.unknown_files + self.missing_files


def run(folder: Path, model: str, jobs: int) -> Report:
    """Start a server in ``folder`` and put so many jobs through it."""
    side = find_model(model).limits.min_side
    size = f"{side}x{side}"
    data = DataFolder(folder / "data")
    samples: dict[str, list[int]] = {"api": [], "supervisor": [], "worker": []}
    with RunningServer(data.root, model) as server:
        worker = server.wait_until_ready().worker()
        pids = {"api": server.pid, "supervisor": worker["supervisor_pid"], "worker": worker["worker_pid"]}
        began = time.monotonic()
        waiting: list[str] = []
        for number in range(WARM_UP_JOBS + jobs):
            job = server.submit(size=size, num_frames=FRAMES, num_inference_steps=STEPS, seed=number)
            waiting.append(str(job["id"]))
            if len(waiting) > 1:
                _finish(server, waiting.pop(0), pids, samples)
        _finish(server, waiting.pop(0), pids, samples)
        seconds = time.monotonic() - began
        assert server.worker()["worker_pid"] == pids["worker"], "the worker was replaced"
        statuses, unknown, missing = account(data)
    return Report(
        jobs=jobs,
        model=Path(model).stem,
        clip=f"{FRAMES} frames of {size}, {STEPS} steps",
        seconds=round(seconds, 1),
        statuses=statuses,
        memory={name: _growth(found[WARM_UP_JOBS:]) for name, found in samples.items()},
        unknown_files=unknown,
        missing_files=missing,
    )


def _finish(server: RunningServer, job_id: str, pids: dict[str, int], samples: dict[str, list[int]]) -> None:
    server.wait_for_job(job_id)
    for name, pid in pids.items():
        samples[name].append(memory_bytes(pid))


def _growth(samples: list[int]) -> Growth:
    tenth = max(1, len(samples) // 10)
    first, last = (round(statistics.median(part)) for part in (samples[:tenth], samples[-tenth:]))
    return Growth(first, last, round(last / first - 1, 4))


def account(data: DataFolder) -> tuple[dict[str, int], list[str], list[str]]:
    """Jobs by status; files that no completed job has; files of completed jobs that are not there."""
    with closing(sqlite3.connect(data.database)) as database:
        rows = database.execute("SELECT id, attempt, status FROM jobs").fetchall()
    statuses: dict[str, int] = {}
    known: set[Path] = set()
    for job_id, attempt, status in rows:
        statuses[status] = statuses.get(status, 0) + 1
        if status == "completed":
            known |= {made(job_id, attempt) for made in (data.video, data.thumbnail, data.spritesheet)}
    found = {path for path in data.videos.rglob("*") if path.is_file()}
    return statuses, sorted(map(str, found - known)), sorted(map(str, known - found))


def main() -> int:
    """Exit code 1 when memory grew or a file is nobody's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--model", default=BUNDLED_MODEL)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = run(Path(folder), options.model, options.jobs)
    text = json.dumps(asdict(report), indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(f"{text}\n", encoding="utf-8")
    return 0 if report.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
