"""Whether the server can do its work, and if not, why.

Knows: the database, the supervisor and the worker's report. Does not know: HTTP.
"""

from server.database import DatabaseError
from server.services import Services


def unready_reason(services: Services) -> str | None:
    """None when jobs can be taken and run, else one line for people."""
    if services.supervisor.is_stopping:
        return "draining: the server is stopping"
    if not services.supervisor.is_alive:
        return "the supervisor process is not running; it is being started again"
    try:
        worker = services.worker()
    except DatabaseError as error:
        return f"the database does not answer: {error}"
    if worker is None or worker.supervisor_pid != services.supervisor.pid:
        return f"starting: model {services.preset.name} is not loaded yet"
    if not worker.is_alive:
        return "the supervisor process gives no sign of life"
    return None if worker.state == "ready" else f"{worker.state}: {worker.message}"
