"""When a job will be done, from measured times.

Knows: what earlier jobs of the same shape took, and how far this one is. Does not know: anything that was
not measured; then it says None.
"""

import time
from collections.abc import Iterable

from server.job import Job
from server.jobs import JobTable, QueuePlace

_AFTER_DENOISE = frozenset({"vae_decode", "encode_mp4", "store"})


def remaining_seconds(jobs: JobTable, job: Job) -> float | None:
    """Seconds until a running job ends."""
    timing = jobs.timing(job.shape)
    if timing is None:
        return _from_its_own_steps(job)
    denoise = (job.total_steps - job.step) * timing.step_seconds
    if job.stage not in _AFTER_DENOISE or job.started_at is None:
        return denoise + timing.other_seconds
    elapsed = time.time() - job.started_at - job.denoise_seconds
    return max(0.0, timing.other_seconds - elapsed)


def eta_seconds(jobs: JobTable, job: Job, place: QueuePlace | None, running: Iterable[Job]) -> float | None:
    """Seconds until a job ends: a running one by itself, a queued one after all that is before it."""
    if job.status == "in_progress":
        return remaining_seconds(jobs, job)
    if place is None or place.seconds is None:
        return None
    before = [remaining_seconds(jobs, other) for other in running if other.model == job.model]
    known = [seconds for seconds in before if seconds is not None]
    return place.seconds + sum(known) if len(known) == len(before) else None


def _from_its_own_steps(job: Job) -> float | None:
    if job.step == 0 or job.stage in _AFTER_DENOISE:
        return None
    return (job.total_steps - job.step) * job.denoise_seconds / job.step
