"""Whether the server can do its work, and if not, why.

Knows: the database, the supervisor and the worker's report. Does not know: HTTP.
"""

from collections.abc import Sequence

from server.database import DatabaseError
from server.services import Services
from server.staffing import shown
from server.workers import Worker


def unready_reason(services: Services) -> str | None:
    """None when jobs can be taken and run, else one line for people."""
    if services.supervisor.is_stopping:
        return "draining: the server is stopping"
    model, gpus = services.preset.name, services.settings.gpus
    try:
        found = [worker for worker in services.workers.all() if services.is_for_us(worker)]
    except DatabaseError as error:
        return f"the database does not answer: {error}"
    workers = [worker for worker in found if not _is_out_of_date(worker, services)]
    if any(worker.is_ready for worker in workers):
        return None
    if services.supervisor.slot is None:
        missing = f"model {model}" if gpus == 1 else f"model {model} on {gpus} GPUs"
        return _state_of(workers) or f"no worker of {missing} is up: start one with `reelwright worker`"
    if not services.supervisor.is_alive:
        return "the supervisor process is not running; it is being started again"
    if not workers:
        return f"starting: model {model} is not loaded yet"
    return _state_of(workers) or "the supervisor process gives no sign of life"


def unserved_jobs(services: Services) -> list[str]:
    """A line for people about each kind of jobs that wait for workers that nobody has started."""
    try:
        return shown(services.staff().unserved(services.jobs.waiting()))
    except DatabaseError:  # the reason says so
        return []


def _is_out_of_date(worker: Worker, services: Services) -> bool:
    """Whether the row is that of a supervisor of ours that is gone."""
    ours = services.supervisor
    return worker.name == ours.slot and not (ours.is_alive and worker.supervisor_pid == ours.pid)


def _state_of(workers: Sequence[Worker]) -> str | None:
    living = (worker for worker in workers if worker.is_alive and worker.state != "stopped")
    return next((f"{worker.state}: {worker.message}" for worker in living), None)
