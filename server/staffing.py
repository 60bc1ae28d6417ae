"""Which workers take which jobs, and which jobs wait for workers that nobody has started.

Knows: a job waits for workers of its model, and on several hosts of its number of GPUs. Does not know: how
workers or jobs are found.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from server.jobs import WaitingJobs
from server.workers import Worker

TAKING = frozenset({"loading", "restarting", "ready"})
"""States of a worker that takes jobs now or soon."""


@dataclass(frozen=True, slots=True)
class Unserved:
    """Queued jobs that no living worker takes, and why."""

    waiting: WaitingJobs
    reason: str

    def __str__(self) -> str:
        """For people, in one line."""
        count = self.waiting.count
        return f"{count} queued job{'s wait' if count > 1 else ' waits'}: {self.reason}"


class Staff:
    """The workers that gave a sign of life lately."""

    def __init__(self, workers: Iterable[Worker]) -> None:
        self._living = [worker for worker in workers if worker.is_alive and worker.state != "stopped"]

    def of(self, model: str, gpus: int | None) -> list[Worker]:
        """Those that take jobs of a model; ``gpus`` None: whatever number they have."""
        return [
            worker
            for worker in self._living
            if worker.model == model and gpus in {None, worker.gpus} and worker.state in TAKING
        ]

    def waiting_reason(self, model: str, gpus: int | None) -> str | None:
        """Why such a job waits for a worker that is not there; None: there is one."""
        if self.of(model, gpus):
            return None
        same_model = [worker for worker in self._living if worker.model == model]
        others = sorted({worker.gpus for worker in same_model if gpus not in {None, worker.gpus}})
        failed = [worker for worker in same_model if gpus in {None, worker.gpus}]
        wanted = f"model {model}"
        if gpus is not None and (gpus > 1 or others):
            wanted += f" on {_gpus(gpus)}"
        if failed:
            return f"no worker of {wanted} takes jobs: {failed[0].state}: {failed[0].message}"
        known = (
            f"; those that are up have {' or '.join(_gpus(number) for number in others)}" if others else ""
        )
        return f"no worker of {wanted} is up{known}"

    def unserved(self, waiting: Iterable[WaitingJobs]) -> list[Unserved]:
        """Those of the waiting jobs that no worker takes."""
        reasons = ((jobs, self.waiting_reason(jobs.model, jobs.gpus)) for jobs in waiting)
        return [Unserved(jobs, reason) for jobs, reason in reasons if reason is not None]


def shown(unserved: Sequence[Unserved]) -> list[str]:
    """For people, a line each."""
    return [str(each) for each in unserved]


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"
