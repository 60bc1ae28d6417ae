"""``reelwright serve``: from settings to a listening process, and to a clean end.

Knows: the order of starting and stopping. Does not know: routes or jobs.
"""

import asyncio
import os
import socket
import sys
from contextlib import closing
from types import FrameType

import uvicorn

from configs.settings import Settings
from server import logs
from server.app import create_app
from server.database import DatabaseError, DatabaseVersionError, open_database
from server.files import DataFolder
from server.http_connection import HttpConnection
from server.lock import DataFolderInUseError, FolderLock, acquire
from server.model_choice import choose_model
from server.services import Services, build_services
from server.supervisor import SupervisorStart
from server.supervisor_handle import SupervisorHandle
from server.webhook_table import WebhookTable

# For answers on their way when the drain is over, and when a second signal has ended it.
CLOSE_SECONDS = 5
STOP_NOW_SECONDS = 1


class StartError(RuntimeError):
    """The server cannot start; the message says why in one line."""


class DrainingServer(uvicorn.Server):
    """Goes on answering while the running job is drained.

    The first signal ends event streams and starts the drain, the second ends the drain, the third everything.
    """

    def __init__(self, config: uvicorn.Config, services: Services) -> None:
        super().__init__(config)
        self._services = services
        self._signals = 0
        self._drain: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called for SIGTERM and SIGINT, in the middle of anything."""
        self._signals += 1
        if self._signals > 2:
            # The supervisor finds its pipe closed, kills its worker and queues the running job again.
            os._exit(128 + sig)

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second."""
        if self._signals and self._drain is None:
            self._drain = asyncio.create_task(self._begin_drain())
        if self._signals > 1 and not self.should_exit:
            logs.get_logger().info("drain_ended_by_signal")
            self.config.timeout_graceful_shutdown = STOP_NOW_SECONDS
            self.should_exit = True
        if self._drain is not None and self._drain.done():
            self.should_exit = True
        return await super().on_tick(counter)

    async def _begin_drain(self) -> None:
        seconds = self._services.settings.drain_seconds
        logs.get_logger().info("draining", seconds=seconds)
        self._services.feed.close()
        await self._services.supervisor.drain(seconds)


def serve(settings: Settings) -> None:
    """Run until a signal. Raises SettingsError and StartError."""
    logs.configure(settings, "api")
    # Python's helper process of killed workers would warn, in a line of its own format, that it tidied up.
    sys.warnoptions.append("ignore:resource_tracker:UserWarning")
    settings.check_listening()
    preset, attention = choose_model(settings)
    files = DataFolder(settings.data_dir)
    listener = _listen(settings.host, settings.port)
    lock = _open(settings, files)
    supervisor = SupervisorHandle(SupervisorStart(settings, preset, lock))
    services = build_services(settings, preset, attention, files, supervisor)
    services.workers.forget_all()
    WebhookTable(services.database).release_all()
    config = uvicorn.Config(
        create_app(services),
        http=HttpConnection,
        log_config=None,
        access_log=False,
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    logs.get_logger().info("listening", url=f"http://{shown}:{port}", model=preset.name, data=str(files.root))
    try:
        DrainingServer(config, services).run(sockets=[listener])
    finally:
        supervisor.stop_now()
        services.database.close()
        lock.release()
        logs.get_logger().info("stopped")


def _open(settings: Settings, files: DataFolder) -> FolderLock:
    try:
        files.create()
        lock = acquire(files.lock)
        with closing(open_database(settings)) as database:
            database.migrate()
    except (DataFolderInUseError, DatabaseVersionError) as error:
        raise StartError(str(error)) from error
    except (OSError, DatabaseError) as error:
        raise StartError(f"data folder {files.root} cannot be used: {error}") from error
    return lock


def _listen(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise StartError(f"cannot listen on {host}: {error.strerror}") from error
    family, _, _, _, address = found[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise StartError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return listener
