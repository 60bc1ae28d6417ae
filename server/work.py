"""``reelwright worker``: a supervisor alone, for the API processes of the same database.

Knows: the order of starting, and what signals mean. Does not know: jobs, or how they are run.
"""

import multiprocessing
import os
import signal
import sys
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from types import FrameType

from configs.settings import Settings
from server import logs
from server.files import DataFolder
from server.joining import join
from server.model_choice import check_gpus, choose_model
from server.protocol import ApiMessage, Drain
from server.starting import migrated_database, open_slot
from server.supervisor import SupervisorStart, supervise


class StopSignals:
    """SIGTERM and Ctrl-C: the first drains, the second ends the drain, the third everything."""

    def __init__(self, supervisor: "Connection[ApiMessage, None]", drain_seconds: float) -> None:
        self._supervisor = supervisor
        self._drain_seconds = drain_seconds
        self._signals = 0

    def install(self) -> None:
        """From now on."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals > 2:
            os._exit(128 + number)  # the kernel ends the worker process; others find the claims lost
        with suppress(OSError):  # it has ended already
            self._supervisor.send(Drain(self._drain_seconds if self._signals == 1 else 0.0))


def work(settings: Settings) -> None:
    """Run jobs until a signal. Raises SettingsError and StartError."""
    settings.check_shared("reelwright worker")
    logs.configure(settings, "supervisor")
    # Python's helper process of killed workers would warn, in a line of its own format, that it tidied up.
    sys.warnoptions.append("ignore:resource_tracker:UserWarning")
    preset, attention = choose_model(settings)
    check_gpus(preset, attention, settings.gpus)
    folder = DataFolder(settings.data_dir)
    slot = open_slot(settings, folder)
    with closing(migrated_database(settings)) as database:
        join(settings, database, preset.name, slot)
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    StopSignals(ours, settings.drain_seconds).install()
    logs.get_logger().info("worker_started", worker=slot.name, model=preset.name, data=str(folder.root))
    supervise(SupervisorStart(settings, preset, slot.lock, slot.name), theirs)
    slot.lock.release()
    logs.get_logger().info("stopped")
