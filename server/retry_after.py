"""What ``Retry-After`` says to a client whose job is not taken now.

Knows: what has to end first. Does not know: when that is (estimates.py, timetable.py), or HTTP.
"""

import math
from collections.abc import Iterable

from server.estimates import remaining_seconds
from server.jobs import JobTable
from server.staffing import Staff
from server.timetable import Timetable

RETRY_SECONDS_WITHOUT_HISTORY = 30
LONGEST_RETRY_SECONDS = 3600


def retry_after_full_queue(jobs: JobTable, model: str) -> int:
    """Whole seconds until a running job of the model is likely to end: then one leaves the queue."""
    return _whole_seconds(remaining_seconds(jobs, job) for job in jobs.running() if job.model == model)


def retry_after_quota(jobs: JobTable, staff: Staff, owner: str) -> int:
    """Whole seconds until the first of the owner's jobs is likely to end."""
    unfinished = jobs.unfinished(owner)
    tables = {model: Timetable(jobs, model, staff) for model in {job.model for job in unfinished}}
    return _whole_seconds(tables[job.model].end_of(job) for job in unfinished)


def _whole_seconds(candidates: Iterable[float | None]) -> int:
    known = [seconds for seconds in candidates if seconds is not None]
    soonest = min(known) if known else RETRY_SECONDS_WITHOUT_HISTORY
    return min(LONGEST_RETRY_SECONDS, max(1, math.ceil(soonest)))
