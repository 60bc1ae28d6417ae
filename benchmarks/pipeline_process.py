"""A process for each variant, and the messages between it and the one that asks.

Knows: processes and pipes. Does not know: what is measured; torch is imported in the children only.
"""

import contextlib
import multiprocessing
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Literal, TypeVar

from benchmarks.pipeline_records import Bench, Facts, Failure, Request, Round

Order = Literal["warm_up", "measure", "end"]
Wanted = TypeVar("Wanted")
END_SECONDS = 60.0


class VariantProcess:
    """The asking side. After a failure every answer is that failure."""

    def __init__(self, request: Request) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other, request), daemon=True)
        self._process.start()
        other.close()
        self._failure: Failure | None = None

    def facts(self) -> Facts | Failure:
        """What it is; waits until it is built, or warm. For each of the two, ask once."""
        return self._receive(Facts)

    def begin_warm_up(self) -> None:
        """Let it do what only the first time costs; facts come when that is done."""
        self._send("warm_up")

    def measure(self) -> Round | Failure:
        """One round."""
        self._send("measure")
        return self._receive(Round)

    def end(self) -> None:
        """End the process, by force if it does not."""
        self._send("end")
        self._process.join(END_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._connection.close()

    def kill(self) -> None:
        """End the process whatever it does."""
        self._process.kill()
        self.end()

    def _send(self, order: Order) -> None:
        with contextlib.suppress(OSError):  # it is dead: receiving says so
            self._connection.send(order)

    def _receive(self, wanted: type[Wanted]) -> Wanted | Failure:
        if self._failure is not None:
            return self._failure
        try:
            found = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(END_SECONDS)
            found = Failure(f"its process ended with exit code {self._process.exitcode}")
        if isinstance(found, wanted):
            return found
        self._failure = found if isinstance(found, Failure) else Failure(f"it answered {found!r}")
        return self._failure


@contextlib.contextmanager
def started(requests: Sequence[Request]) -> Iterator[list[VariantProcess]]:
    """Processes of all requests, building at the same time; ended with the block."""
    processes = [VariantProcess(request) for request in requests]
    try:
        yield processes
    except BaseException:
        for process in processes:
            process.kill()
        raise
    for process in processes:
        process.end()


def serve(connection: Connection, request: Request) -> None:
    """The answering side: facts, then an answer to each order. Any error becomes the last answer."""
    try:
        bench = bench_of(request)
        connection.send(bench.facts())
        while (order := connection.recv()) != "end":
            if order == "warm_up":
                bench.warm_up()
                connection.send(bench.facts())
            else:
                connection.send(bench.measure())
    except EOFError:
        pass  # nobody asks any more
    except Exception as error:
        traceback.print_exc()
        connection.send(Failure(f"{type(error).__name__}: {error}"))


def bench_of(request: Request) -> Bench:
    """What the request is measured by. Imports torch."""
    if not request.whole_job:
        from benchmarks.pipeline_step import StepBench

        return StepBench(request)
    from benchmarks.pipeline_job import OurJobBench, StockJobBench

    return (OurJobBench if request.variant.ours else StockJobBench)(request)
