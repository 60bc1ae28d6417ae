"""Clients of a load test: as little work for each request as Python allows, so that the servers are measured.

Knows: HTTP/1.1 over one kept connection, and clocks. Does not know: what is asked for, or why.
"""

import asyncio
import random
import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Connection:
    """One kept connection to a server on this machine."""

    port: int
    path: str
    seconds: list[float] = field(default_factory=list)
    _streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def get(self) -> None:
        """One GET; keeps the time from sending to the whole answer. Raises RuntimeError unless it is 200."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self._streams
        began = time.perf_counter()
        writer.write(f"GET {self.path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        (length,) = [int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:")]
        await reader.readexactly(length)
        self.seconds.append(time.perf_counter() - began)
        if b" 200 " not in lines[0]:
            raise RuntimeError(f"{self.path}: {lines[0].decode()}")

    def close(self) -> None:
        """Hang up."""
        if self._streams is not None:
            self._streams[1].close()


async def poll(connections: list[Connection], interval_seconds: float, until: float) -> None:
    """One client: asks each of its servers in turn, once an interval, from a random moment on."""
    await asyncio.sleep(random.random() * interval_seconds)
    due = time.monotonic()
    while due < until:
        for connection in connections:
            await connection.get()
        due += interval_seconds
        await asyncio.sleep(max(0.0, due - time.monotonic()))
    for connection in connections:
        connection.close()


async def watch(port: int, path: str, until: float) -> int:
    """One event stream, opened again when its job ends; returns how many events came."""
    events = 0
    while time.monotonic() < until:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        try:
            async with asyncio.timeout(until - time.monotonic()):
                while line := await reader.readline():
                    events += line.startswith(b"event:")
                    if line == b"0\r\n":
                        break
        except TimeoutError:
            pass
        finally:
            writer.close()
    return events
