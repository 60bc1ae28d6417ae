"""When the waiting jobs of a model will start and end, as many at a time as there are workers.

Knows: each worker takes the next job when it is free. Does not know: how long jobs take (estimates.py); if
one before a job is not known, neither is the job's time.
"""

import heapq
from collections.abc import Iterable, Mapping

from server.estimates import remaining_seconds
from server.job import Job
from server.jobs import JobTable, QueuePlace
from server.staffing import Staff

Seconds = float | None


class Timetable:
    """One look at the queue of a model. Times are seconds from then on; None: not known."""

    def __init__(self, jobs: JobTable, model: str, staff: Staff) -> None:
        self.places: Mapping[str, QueuePlace] = jobs.queue(model)
        self._model = model
        self._staff = staff
        running = [job for job in jobs.running() if job.model == model]
        self._running = [(job, remaining_seconds(jobs, job)) for job in running]
        self._ends: dict[str, Seconds] = {}
        for gpus in {place.gpus for place in self.places.values()}:
            queue = {job_id: place for job_id, place in self.places.items() if place.gpus == gpus}
            ends = _ends(self._free_at(gpus), [place.seconds for place in queue.values()])
            self._ends |= dict(zip(queue, ends, strict=True))

    def end_of(self, job: Job) -> Seconds:
        """Seconds until a job ends, whether it waits or runs."""
        if job.status == "in_progress":
            return next((left for running, left in self._running if running.id == job.id), None)
        return self._ends.get(job.id)

    def place_of_next(self, priority: int, gpus: int | None) -> int:
        """The place that a new job would get."""
        return 1 + len(self._before(priority, gpus))

    def start_of_next(self, priority: int, gpus: int | None) -> Seconds:
        """Seconds until a new job would start."""
        *_, end = _ends(self._free_at(gpus), [*self._before(priority, gpus), 0.0])
        return end

    def _before(self, priority: int, gpus: int | None) -> list[Seconds]:
        return [
            place.seconds
            for place in self.places.values()
            if place.gpus == gpus and place.priority >= priority
        ]

    def _free_at(self, gpus: int | None) -> list[float] | None:
        """When each worker will be free; None: there is none, or it is not known of one."""
        left: dict[str, float] = {worker.name: 0.0 for worker in self._staff.of(self._model, gpus)}
        if not left:
            return None
        strays = 0.0
        for job, seconds in self._running:
            if job.gpus != gpus:
                continue
            if seconds is None:
                return None
            if job.worker in left:
                left[job.worker] += seconds
            else:  # its worker is lost: another one will run it
                strays += seconds
        free_at = sorted(left.values())
        return [free_at[0] + strays, *free_at[1:]]


def _ends(free_at: list[float] | None, lengths: Iterable[Seconds]) -> list[Seconds]:
    """When each of the jobs ends, in their order."""
    workers = None if free_at is None else list(free_at)
    if workers is not None:
        heapq.heapify(workers)
    ends: list[Seconds] = []
    for seconds in lengths:
        if workers is None or seconds is None:
            workers = None  # from here on it is not known when a worker is free
            ends.append(None)
            continue
        end = workers[0] + seconds
        heapq.heapreplace(workers, end)
        ends.append(end)
    return ends
