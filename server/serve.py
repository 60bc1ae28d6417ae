"""``reelwright serve``: from settings to a listening process, and to a clean end.

Knows: the order of starting and stopping. Does not know: routes or jobs.
"""

import asyncio
import os
import socket
import sys
from types import FrameType

import uvicorn

from configs.settings import Settings
from server import logs
from server.app import create_app
from server.files import DataFolder
from server.http_connection import HttpConnection
from server.joining import join
from server.model_choice import check_gpus, choose_model
from server.remote_workers import RemoteWorkers
from server.services import Services, build_services
from server.starting import StartError, migrated_database, open_slot
from server.storage.opening import open_store
from server.supervisor import SupervisorStart
from server.supervisor_handle import SupervisorHandle
from server.webhook_table import WebhookTable
from server.workers import WorkerTable

# For answers on their way when the drain is over, and when a second signal has ended it.
CLOSE_SECONDS = 5
STOP_NOW_SECONDS = 1


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
    settings.check_workers()
    preset, attention = choose_model(settings)
    check_gpus(preset, attention, settings.gpus)
    files = DataFolder(settings.data_dir)
    store = open_store(settings, files)
    listener = _listen(settings.host, settings.port)
    slot = open_slot(settings, files) if settings.local_worker else None
    database = migrated_database(settings)
    if not database.is_remote:  # this server is the only one: what the tables say of others is of one before
        WorkerTable(database).forget_all()
        WebhookTable(database).release_all()
    join(settings, database, preset.name, slot)
    supervisor: SupervisorHandle | RemoteWorkers
    if slot is not None:
        supervisor = SupervisorHandle(SupervisorStart(settings, preset, slot.lock, slot.name))
    else:
        supervisor = RemoteWorkers(database, store, settings.retention_seconds)
    services = build_services(settings, preset, attention, database, store, supervisor)
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
        database.close()
        if slot is not None:
            slot.lock.release()
        logs.get_logger().info("stopped")


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
