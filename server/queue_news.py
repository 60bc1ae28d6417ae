"""Wakes a supervisor when another host changes the queue.

Knows: the database's listener, and that its connection may break. Does not know: what changed. Whoever waits
for it looks by itself every second, so news may be lost.
"""

from server.database import Database, DatabaseError, Listener


class QueueNews:
    """Nothing to wait for with SQLite: there, processes of one host wake each other through pipes."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._listener: Listener | None = None

    def open(self) -> None:
        """Listen, if that is not done yet. Raises DatabaseError."""
        if self._listener is None:
            self._listener = self._database.listen()

    def sources(self) -> list[int]:
        """What becomes readable when there are news."""
        return [] if self._listener is None else [self._listener.fileno()]

    def clear(self) -> None:
        """Forget those that there are."""
        if self._listener is not None:
            try:
                self._listener.has_changed()
            except DatabaseError:
                self.close()

    def close(self) -> None:
        """Stop to listen."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
