"""Catching a job while its file is written."""

from tests.faults import processes
from tests.faults.faulty_server import FaultyServer

ENCODED = {"num_frames": 17, "seed": 3}  # more frames than the pipe to ffmpeg holds


def catch_writing(server: FaultyServer, job_id: str) -> tuple[int, int]:
    """Stop the worker while its ffmpeg writes a job's file; returns both pids."""
    processes.wait_until(lambda: server.row(job_id).stage == "vae_decode", "the decode begins")
    worker = server.worker_pid

    def writes() -> bool:
        return server.row(job_id).stage == "encode_mp4" and processes.ffmpeg_of(worker) is not None

    server.run_worker_until(writes, "ffmpeg writes the file")
    ffmpeg = processes.ffmpeg_of(worker)
    assert ffmpeg is not None
    return worker, ffmpeg
