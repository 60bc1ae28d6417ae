"""Many jobs over many worker processes that are killed at random: does every job end exactly once?

    python -m benchmarks.cluster_soak --json benchmarks/results/cluster_soak.json

Real API, workers, PostgreSQL and store; only the model is a stub (tests/server/scripted_worker.py). A trigger
in the database writes down every end of a job: no process of ours can take a line back. What is killed, with
SIGKILL, is drawn from a seed: the process with the model; the whole worker, which comes back with its data
folder; or the whole host, in whose place comes another one.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from unittest.mock import patch

import psycopg

from server.job import Job
from server.jobs import JobTable
from server.storage.objects import ObjectVideoStore
from server.storage.opening import open_objects
from server.storage.sweep import sweep_objects
from tests.faults import processes
from tests.postgres import PostgresServer
from tests.server.cluster.processes import Cluster, RunningWorker
from tests.server.databases import disagreements
from tests.server.running_server import RunningServer
from tests.server.storage.bucket import URL, Bucket
from tests.server.storage.flaky_proxy import FlakyProxy

SCRIPT = "denoise step pause checkpoint pause preview finish"
KINDS = ("process", "process", "process", "worker", "worker", "host")
PATIENCE_SECONDS = 900.0
SUBMITTING_THREADS = 4
WITNESS = b"""
CREATE TABLE IF NOT EXISTS endings (job_id TEXT NOT NULL, attempt BIGINT NOT NULL, status TEXT NOT NULL);
CREATE OR REPLACE FUNCTION note_ending() RETURNS TRIGGER LANGUAGE plpgsql
AS $$ BEGIN INSERT INTO endings VALUES (NEW.id, NEW.attempt, NEW.status); RETURN NULL; END; $$;
CREATE OR REPLACE TRIGGER note_ending AFTER UPDATE OF status ON jobs FOR EACH ROW
WHEN (NEW.status IN ('completed', 'failed', 'cancelled')) EXECUTE FUNCTION note_ending();
"""


@dataclass(frozen=True, slots=True)
class Report:
    """What a run came to. ``ends_per_job``: jobs by how often they ended; ``strays``: objects of no job.

    ``swept``: what a killed process had no time to remove, and the sweep at the end did.
    """

    jobs: int
    workers: int
    store: str
    seconds: float
    kills: dict[str, int]
    endings: dict[str, int]
    attempts: dict[str, int]
    ends_per_job: dict[str, int]
    missing_files: list[str]
    strays: list[str]
    swept: int
    queue_disagreements: int
    tracebacks: int
    failed_store_requests: int = 0

    @property
    def is_good(self) -> bool:
        """Every job ended once, completed or lost with two workers, and the store has just their files."""
        ended_once = self.ends_per_job == {"1": self.jobs}
        may_be = set(self.endings) <= {"completed", "worker_lost"}
        is_clean = not (self.missing_files or self.strays or self.queue_disagreements or self.tracebacks)
        return ended_once and may_be and is_clean


@dataclass
class Chaos:
    """Kills one thing after another while jobs run."""

    cluster: Cluster
    workers: list[RunningWorker]
    random: random.Random
    kills: Counter[str] = field(default_factory=Counter)

    def strike(self) -> None:
        """Kill something."""
        kind, place = self.random.choice(KINDS), self.random.randrange(len(self.workers))
        worker = self.workers[place]
        if kind == "process":
            with suppress(KeyError, AssertionError, ProcessLookupError):  # it is just being started again
                processes.kill(self.cluster.worker_pid(worker))
                self.kills[kind] += 1
            return
        worker.kill()
        self.kills[kind] += 1
        if kind == "host":
            self.workers[place] = self.cluster.worker()
        else:
            worker.start()


def run(
    cluster: Cluster, store: ObjectVideoStore, *, jobs: int, workers: int, kills: int, seed: int = 1
) -> Report:
    """Put so many jobs through a cluster in which nothing runs yet; ``store`` is its store."""
    with psycopg.connect(cluster.database_url, autocommit=True) as witness:
        api = cluster.api()
        witness.execute(WITNESS)
        chaos = Chaos(cluster, [cluster.worker() for _ in range(workers)], random.Random(seed))
        cluster.wait_until_ready(*chaos.workers)
        began = time.monotonic()
        table = JobTable(cluster.database)
        with ThreadPoolExecutor(SUBMITTING_THREADS) as pool:
            submitted = [pool.submit(_submit, api, number) for number in range(jobs)]
            for number in range(kills):
                # Spread over the run, however fast this machine is.
                _wait_for_ends(table, submitted, jobs * number // (kills + 1))
                chaos.strike()
            ids = [each.result() for each in submitted]
        _wait_for_ends(table, submitted, jobs)
        seconds = time.monotonic() - began
        found = [_find(table, job_id) for job_id in ids]
        wanted = {
            f"videos/{job.id}/{job.attempt}{ending}"
            for job in found
            if job.status == "completed"
            for ending in (".mp4", ".thumbnail.jpg")
        }
        for worker in chaos.workers:
            worker.kill()
        swept = asyncio.run(sweep_objects(store, table, grace_seconds=0.0))
        there = asyncio.run(_names(store))
        ends = Counter(row[0] for row in witness.execute("SELECT job_id FROM endings").fetchall())
    return Report(
        jobs=jobs,
        workers=workers,
        store=cluster.storage_url.partition(":")[0],
        seconds=round(seconds, 1),
        kills=dict(chaos.kills),
        endings=dict(Counter(job.error.code if job.error else job.status for job in found)),
        attempts=_counted(job.attempt for job in found),
        ends_per_job=_counted(ends[job_id] for job_id in ids),
        missing_files=sorted(wanted - there),
        strays=sorted(there - wanted),
        swept=len(swept),
        queue_disagreements=len(disagreements(cluster.database)),
        tracebacks=sum(
            log.read_text(errors="replace").count("Traceback") for log in cluster.folder.glob("*.log")
        ),
    )


def _submit(api: RunningServer, number: int) -> str:
    return str(api.submit(prompt=SCRIPT, num_inference_steps=3, seed=number)["id"])


def _find(table: JobTable, job_id: str) -> Job:
    job = table.find(job_id)
    assert job is not None
    return job


def _ended(table: JobTable, submitted: list[Future[str]]) -> int:
    """How many have ended; those that are not submitted yet have not."""
    sent = sum(each.done() for each in submitted)  # before the look at the table: rather one too few
    return max(0, sent - sum(counts.queued + counts.running for counts in table.counts().values()))


async def _names(store: ObjectVideoStore) -> set[str]:
    return {entry.name async for entry in store.all_objects()}


def _counted(values: Iterable[int]) -> dict[str, int]:
    return {str(value): count for value, count in sorted(Counter(values).items())}


def _wait_for_ends(table: JobTable, submitted: list[Future[str]], count: int) -> None:
    give_up_at = time.monotonic() + PATIENCE_SECONDS
    while _ended(table, submitted) < count:
        assert time.monotonic() < give_up_at, f"jobs go on after {PATIENCE_SECONDS:g} s"
        time.sleep(0.05)


def run_over_folder(folder: Path, database_url: str, *, jobs: int, workers: int, kills: int) -> Report:
    """With a folder as the store."""
    (folder / "store").mkdir()
    url = f"file://{folder / 'store'}"
    with Cluster(folder, database_url, url) as cluster:
        return run(cluster, open_objects(url, 0), jobs=jobs, workers=workers, kills=kills)


def run_over_s3(folder: Path, database_url: str, *, jobs: int, workers: int, kills: int) -> Report:
    """With an S3 server that fails every third request."""
    with ExitStack() as stack:
        bucket = stack.enter_context(Bucket())
        bucket.empty()
        proxy = stack.enter_context(FlakyProxy(bucket.port, is_flaky=True))
        cluster = stack.enter_context(Cluster(folder, database_url, URL, env=bucket.variables(proxy.port)))
        stack.enter_context(patch.dict(os.environ, bucket.variables()))
        report = run(cluster, bucket.store(), jobs=jobs, workers=workers, kills=kills)
        return replace(report, failed_store_requests=proxy.failed)


def main() -> int:
    """Exit code 1 when a job did not end just once, or a file is missing or nobody's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--store", choices=("folder", "s3"), default="folder")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    run_over = run_over_folder if options.store == "folder" else run_over_s3
    with tempfile.TemporaryDirectory() as folder, PostgresServer() as postgres:
        report = run_over(
            Path(folder),
            postgres.create_empty(),
            jobs=options.jobs,
            workers=options.workers,
            kills=options.kills,
        )
    text = json.dumps(asdict(report), indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(f"{text}\n", encoding="utf-8")
    return 0 if report.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
