"""200 clients polling a job and 50 event streams while it runs, beside a bare FastAPI route.

    python -m benchmarks.api_load --json benchmarks/results/api_load.json

Each client asks Reelwright and the bare server in turn, so both meet the same load of the machine at the same
time. The bare route answers with the same document from memory. The job is the longest that the model makes.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from benchmarks.load_client import Connection, poll, watch
from configs.model_preset import BUNDLED_MODEL, find_model
from tests.server.running_server import RunningServer, free_port

CLIENTS, STREAMS = 200, 50
INTERVAL_SECONDS = 1.0
SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds from sending a request to its whole answer."""

    requests: int
    p50_seconds: float
    p99_seconds: float
    max_seconds: float


@dataclass(frozen=True, slots=True)
class Report:
    """What a run came to; the ratios are Reelwright's over the bare route's."""

    cores: int
    clients: int
    streams: int
    interval_seconds: float
    seconds: float
    model: str
    steps_done: int
    events: int
    reelwright: Latency
    bare: Latency
    p50_ratio: float
    p99_ratio: float


def run(folder: Path, model: str, clients: int, streams: int, seconds: float) -> Report:
    """Start both servers and load them."""
    with RunningServer(folder / "data", model) as server:
        server.wait_until_ready()
        limits = find_model(model).limits
        longest = {"num_frames": limits.max_num_frames, "num_inference_steps": limits.max_num_inference_steps}
        job_id = str(server.submit(**longest)["id"])
        document = server.wait_for_step(job_id, 1)
        (folder / "document.json").write_text(json.dumps(document), encoding="utf-8")
        port = free_port()
        command = [sys.executable, "-m", "benchmarks.bare_app", str(port), str(folder / "document.json")]
        with subprocess.Popen(command) as bare:
            try:
                _wait_for(f"http://127.0.0.1:{port}/bare")
                measured = asyncio.run(_load(server, job_id, port, clients, streams, seconds))
            finally:
                bare.terminate()
        steps = server.job(job_id)["step"] - document["step"]
        assert server.job(job_id)["status"] == "in_progress", "the job ended too soon"
    ours, theirs, events = measured
    return Report(
        cores=os.cpu_count() or 1,
        clients=clients,
        streams=streams,
        interval_seconds=INTERVAL_SECONDS,
        seconds=seconds,
        model=Path(model).stem,
        steps_done=steps,
        events=events,
        reelwright=ours,
        bare=theirs,
        p50_ratio=round(ours.p50_seconds / theirs.p50_seconds, 2),
        p99_ratio=round(ours.p99_seconds / theirs.p99_seconds, 2),
    )


async def _load(
    server: RunningServer, job_id: str, bare_port: int, clients: int, streams: int, seconds: float
) -> tuple[Latency, Latency, int]:
    until = time.monotonic() + seconds
    path = f"/v1/videos/{job_id}"
    ours = [Connection(server.port, path) for _ in range(clients)]
    bare = [Connection(bare_port, "/bare") for _ in range(clients)]
    watching = [asyncio.create_task(watch(server.port, f"{path}/events", until)) for _ in range(streams)]
    pairs = [[mine, other] for mine, other in zip(ours, bare, strict=True)]
    pairs[::2] = [pair[::-1] for pair in pairs[::2]]  # who is asked second finds a warmer processor
    await asyncio.gather(*(poll(pair, INTERVAL_SECONDS, until) for pair in pairs))
    events = sum(await asyncio.gather(*watching))
    return _latency(ours), _latency(bare), events


def _latency(connections: list[Connection]) -> Latency:
    found = sorted(seconds for connection in connections for seconds in connection.seconds[1:])
    cuts = statistics.quantiles(found, n=100, method="inclusive")
    return Latency(len(found), round(cuts[49], 6), round(cuts[98], 6), round(found[-1], 6))


def _wait_for(url: str) -> None:
    for _ in range(200):
        try:
            httpx.get(url).raise_for_status()
        except httpx.HTTPError:
            time.sleep(0.1)
        else:
            return
    raise RuntimeError(f"nothing answers at {url}")


def main() -> None:
    """Print the report, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="20 clients and 5 streams for 4 seconds")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--model", default=BUNDLED_MODEL)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    clients, streams, seconds = (20, 5, 4.0) if options.quick else (CLIENTS, STREAMS, options.seconds)
    with tempfile.TemporaryDirectory() as folder:
        report = run(Path(folder), options.model, clients, streams, seconds)
    text = json.dumps(asdict(report), indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
