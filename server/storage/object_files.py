"""A job's files in a scratch folder first, and then in an object store.

Knows: the scratch folder, the store, and what is tried again. Does not know: the supervisor's loop, or rows;
the loop hears of everything through messages. All that talks to the store runs in a thread of its own.
"""

import asyncio
import hashlib
import secrets
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.job import JobPaths, JobResult, PictureFile, VideoFile
from server import logs
from server.backoff import Backoff
from server.claims import Claim
from server.files import DataFolder
from server.identity import Owner
from server.job import Job
from server.jobs import JobTable
from server.storage.errands import Errands, NewestOnly
from server.storage.job_files import (
    CheckpointFetched,
    FilesLost,
    FilesStored,
    PreviewStored,
    StorageMessage,
)
from server.storage.keys import FOLDER, RESULT_KINDS, Kind, ObjectKey
from server.storage.marker import Claimed
from server.storage.objects import ObjectVideoStore, UploadStoppedError
from server.storage.outbox import read_record, write_record
from server.storage.store import StorageError
from server.storage.sweep import sweep_objects, sweep_scratch, tidy_scratch

# Finished jobs that may wait for the store; then the device stands still, so that the disk does not fill up.
MOST_WAITING = 16
LONGEST_BACKOFF_SECONDS = 60.0
REMOVAL_TRIES = 5
FETCH_TRIES = 3
# The device stands still meanwhile, and beginning at step 1 is always right.
FETCH_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class SweepTimes:
    """How often to look for objects that no job knows, and how old such an object must be."""

    every_seconds: float = 3600.0
    grace_seconds: float = 3600.0


@dataclass(frozen=True, slots=True)
class _Finished:
    """One finished file."""

    key: ObjectKey
    path: Path
    bytes: int
    sha256: str


class ObjectJobFiles:
    """Implements JobFiles."""

    def __init__(
        self,
        folder: DataFolder,
        store: ObjectVideoStore,
        jobs: JobTable,
        owner: Owner,
        sweep_times: SweepTimes = SweepTimes(),
    ) -> None:
        self._folder = folder
        self._store = store
        self._jobs = jobs
        self._claimed = Claimed(store, owner)
        self._sweep_times = sweep_times
        self._errands = Errands()
        self._previews = NewestOnly()
        self._checkpoints = NewestOnly()
        self._held: set[Claim] = set()
        self._waiting: set[Claim] = set()
        self._log = logs.get_logger()

    @property
    def is_full(self) -> bool:
        return len(self._waiting) >= MOST_WAITING

    def prepare(self, job: Job) -> JobPaths | None:
        claim = Claim(job.id, job.attempt)
        self._held.add(claim)
        paths = self._folder.prepare(job.id, job.attempt)
        paths = JobPaths(paths.video, paths.thumbnail, paths.spritesheet, self._path(claim, "checkpoint"))
        if job.checkpoint_step == 0:
            return paths
        self._errands.run(claim, lambda stop: self._fetch(claim, paths, stop))
        return None

    def show(self, claim: Claim, step: int, jpeg: bytes) -> bool:
        async def send(stop: asyncio.Event) -> None:
            await self._previews.send(claim, lambda: self._send_preview(claim, step, jpeg, stop))

        self._errands.run(claim, send)
        return False

    def save_checkpoint(self, claim: Claim) -> None:
        async def send(stop: asyncio.Event) -> None:
            await self._checkpoints.send(claim, lambda: self._send_checkpoint(claim, stop))

        self._errands.run(claim, send)

    def publish(self, claim: Claim, result: JobResult) -> bool:
        write_record(self._path(claim, "video"), result)
        self._folder.sync(claim.job_id)
        self._held.add(claim)
        self._waiting.add(claim)
        self._errands.run(claim, lambda stop: self._publish(claim, result, stop))
        return False

    def finished(self, claim: Claim) -> JobResult | None:
        return read_record(self._path(claim, "video"))

    def stop(self, claim: Claim) -> None:
        self._waiting.discard(claim)
        self._errands.stop(claim)

    def finish(self, claim: Claim, completed_attempt: int) -> None:
        self._let_go(claim)
        self._folder.remove(claim.job_id)

        async def remove_rest() -> None:
            kept = {ObjectKey(claim.job_id, completed_attempt, kind) for kind in RESULT_KINDS}
            found = await self._store.keys_of(claim.job_id)
            await self._store.delete([str(key) for key in found if key not in kept])

        self._remove(claim.job_id, remove_rest)

    def discard(self, claim: Claim) -> None:
        self._let_go(claim)
        checkpoint = self._path(claim, "checkpoint")
        self._folder.discard_attempt(claim.job_id, claim.attempt, kept=checkpoint)
        names = [str(ObjectKey(claim.job_id, claim.attempt, kind)) for kind in (*RESULT_KINDS, "preview")]
        self._remove(claim.job_id, lambda: self._store.delete(names))

    def remove(self, job_id: str) -> None:
        for claim in [claim for claim in self._held if claim.job_id == job_id]:
            self._let_go(claim)
        self._folder.remove(job_id)

        async def remove_all() -> None:
            await self._store.delete([str(key) for key in await self._store.keys_of(job_id)])

        self._remove(job_id, remove_all)

    def tidy(self, kept: Collection[Claim]) -> None:
        tidy_scratch(self._folder, kept, self._jobs)
        self._errands.run_after("", self._sweep_for_ever)

    def sources(self) -> list[int]:
        return self._errands.sources()

    def messages(self) -> list[StorageMessage]:
        found = self._errands.messages()
        self._waiting -= {said.claim for said in found if isinstance(said, FilesStored | FilesLost)}
        return found

    def close(self) -> None:
        self._errands.close()

    def _path(self, claim: Claim, kind: Kind) -> Path:
        return self._folder.root / str(ObjectKey(claim.job_id, claim.attempt, kind))

    def _let_go(self, claim: Claim) -> None:
        self._held.discard(claim)
        self.stop(claim)

    async def _publish(self, claim: Claim, result: JobResult, stop: asyncio.Event) -> None:
        try:
            for file in self._finished_files(claim, result):
                await self._carry(file, stop)
        except UploadStoppedError:
            return
        except OSError as error:
            self._errands.say(FilesLost(claim, str(error)))
            return
        self._errands.say(FilesStored(claim, result))

    def _finished_files(self, claim: Claim, result: JobResult) -> list[_Finished]:
        """The video last: without it no picture is of use."""
        made: dict[Kind, VideoFile | PictureFile | None] = {
            "thumbnail": result.thumbnail,
            "spritesheet": result.spritesheet,
            "video": result.file,
        }
        return [
            _Finished(
                ObjectKey(claim.job_id, claim.attempt, kind), self._path(claim, kind), file.bytes, file.sha256
            )
            for kind, file in made.items()
            if file is not None
        ]

    async def _carry(self, file: _Finished, stop: asyncio.Event) -> None:
        """Upload a file until it is there, for as long as it takes. Raises OSError, UploadStoppedError."""
        backoff = Backoff(LONGEST_BACKOFF_SECONDS)
        while True:
            try:
                await self._claimed.check()
                await self._store.upload(file.key, file.path, stop.is_set)
                if await self._store.is_stored(file.key, file.bytes, file.sha256):
                    return
                await asyncio.to_thread(_check_intact, file)
                reason = f"{file.key} was sent and is not there as it was sent"
            except StorageError as error:
                reason = str(error)
            seconds = backoff.failed()
            self._log.warning("upload_failed", key=str(file.key), message=reason, retry_seconds=seconds)
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), seconds)
            if stop.is_set():
                raise UploadStoppedError

    async def _send_preview(self, claim: Claim, step: int, jpeg: bytes, stop: asyncio.Event) -> None:
        if stop.is_set():
            return
        try:
            await self._store.put_bytes(ObjectKey(claim.job_id, claim.attempt, "preview"), jpeg)
        except StorageError as error:  # a preview is not worth a second try
            self._log.warning("preview_not_stored", job=claim.job_id, step=step, message=str(error))
            return
        self._errands.say(PreviewStored(claim, step))

    async def _send_checkpoint(self, claim: Claim, stop: asyncio.Event) -> None:
        key = ObjectKey(claim.job_id, claim.attempt, "checkpoint")
        try:
            if not stop.is_set():
                await self._store.upload(key, self._path(claim, "checkpoint"), stop.is_set)
        except UploadStoppedError:
            return
        except FileNotFoundError:  # the job has ended meanwhile
            return
        except (StorageError, OSError) as error:  # the next one may get there
            self._log.warning("checkpoint_not_stored", job=claim.job_id, message=str(error))

    async def _fetch(self, claim: Claim, paths: JobPaths, stop: asyncio.Event) -> None:
        assert paths.checkpoint is not None
        backoff = Backoff(LONGEST_BACKOFF_SECONDS)
        with suppress(TimeoutError):
            async with asyncio.timeout(FETCH_SECONDS):
                while backoff.failures < FETCH_TRIES and not stop.is_set():
                    try:
                        await self._bring_checkpoint(claim, paths.checkpoint)
                        break
                    except (StorageError, OSError) as error:
                        self._log.warning("checkpoint_not_fetched", job=claim.job_id, message=str(error))
                        await asyncio.sleep(backoff.failed())
        if not stop.is_set():
            self._errands.say(CheckpointFetched(claim, paths))

    async def _bring_checkpoint(self, claim: Claim, path: Path) -> None:
        """Put the checkpoint of the newest attempt before this one in its place, if there is any."""
        here = self._newest_checkpoint_here(claim)
        if here is not None and here.attempt == claim.attempt - 1:  # no other host can have a newer one
            (self._folder.root / str(here)).replace(path)
            return
        stored = [key for key in await self._store.keys_of(claim.job_id) if key.kind == "checkpoint"]
        newest = max((key for key in stored if key.attempt < claim.attempt), key=_attempt, default=None)
        if newest is None or (here is not None and here.attempt >= newest.attempt):
            if here is not None:
                (self._folder.root / str(here)).replace(path)
            return
        temporary = path.with_name(f".{path.stem}.{secrets.token_hex(4)}.tmp")
        try:
            await self._store.download(newest, temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def _newest_checkpoint_here(self, claim: Claim) -> ObjectKey | None:
        names = [path.name for path in self._folder.entries(claim.job_id)]
        keys = [ObjectKey.parse(f"{FOLDER}/{claim.job_id}/{name}") for name in names]
        found = [key for key in keys if key and key.kind == "checkpoint" and key.attempt <= claim.attempt]
        return max(found, key=_attempt, default=None)

    def _remove(self, job_id: str, removal: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def try_removal() -> None:
            backoff = Backoff(LONGEST_BACKOFF_SECONDS)
            while True:
                try:
                    await removal()
                    return
                except StorageError as error:
                    seconds = backoff.failed()
                    self._log.warning("objects_not_removed", job=job_id, message=str(error))
                if backoff.failures >= REMOVAL_TRIES:  # a sweep finds them
                    return
                await asyncio.sleep(seconds)

        self._errands.run_after(job_id, try_removal)

    async def _sweep_for_ever(self) -> None:
        while True:
            try:
                await self._claimed.check_again()
                removed = await sweep_objects(self._store, self._jobs, self._sweep_times.grace_seconds)
                removed += await asyncio.to_thread(
                    sweep_scratch, self._folder, {claim.job_id for claim in [*self._held]}, self._jobs
                )
                for name in removed:
                    self._log.info("file_removed", path=name)
            except Exception as error:  # of the store or the database: the next sweep may do better
                self._log.warning("sweep_failed", message=str(error))
            await asyncio.sleep(self._sweep_times.every_seconds)


def _attempt(key: ObjectKey) -> int:
    return key.attempt


def _check_intact(file: _Finished) -> None:
    """Raise OSError if the file here is not the one that was made: then every upload would be in vain."""
    with file.path.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if digest != file.sha256:
        raise OSError(f"{file.path} has changed since it was written: SHA-256 {digest}, not {file.sha256}")
