"""A real PostgreSQL server of the tests' own, in a temporary folder, reached through a socket there."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

import psycopg
from psycopg import sql

from server.database.postgres import PostgresDatabase

START_SECONDS = 120.0
EMPTY = b"""
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid();
DELETE FROM jobs; DELETE FROM procrastinate_jobs; DELETE FROM procrastinate_workers;
DELETE FROM workers; DELETE FROM samples; DELETE FROM buckets; DELETE FROM webhooks;
DELETE FROM shape_timings;
UPDATE identity SET seen_at = NULL, away_from = NULL, away_until = NULL;
CREATE OR REPLACE FUNCTION reelwright_now() RETURNS DOUBLE PRECISION LANGUAGE SQL VOLATILE
AS $$ SELECT CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS DOUBLE PRECISION) $$;
"""
# It need not survive a power cut, only kill -9.
FAST = {"fsync": "off", "full_page_writes": "off", "max_connections": "200"}


def binaries() -> Path | None:
    """The folder of PostgreSQL's programs, the newest one if there are several."""
    found = [Path(program).parent for program in filter(None, [shutil.which("initdb")])]
    packaged = Path("/usr/lib/postgresql").glob("*/bin/initdb")
    found += sorted((path.parent for path in packaged), key=lambda path: -int(path.parts[-2]))
    return found[0] if found else None


class PostgresServer:
    """One server, and its databases that are not in use at the moment."""

    def __init__(self) -> None:
        folder = binaries()
        assert folder is not None
        self._binaries = folder
        self._account = _account()
        self._folder = Path(tempfile.mkdtemp(prefix="reelwright-pg-", dir="/tmp"))  # a socket's path is short
        self._process: subprocess.Popen[bytes] | None = None
        self._made = 0
        self._idle: list[str] = []

    def __enter__(self) -> Self:
        try:
            if self._account is not None:
                os.chown(self._folder, self._account.pw_uid, self._account.pw_gid)
            arguments = ["-D", str(self._data), "-U", "postgres", "-A", "trust", "-E", "UTF8", "-N"]
            self._run("initdb", *arguments, "--locale=C.UTF-8").wait()
            self.start()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    def url(self, name: str) -> str:
        """The URL of a database."""
        return f"postgresql://postgres@/{name}?host={quote(str(self._folder), safe='')}"

    def start(self) -> None:
        """Start it, for the first time or after ``kill``."""
        options = [f"-c{key}={value}" for key, value in FAST.items()]
        sockets = [f"-k{self._folder}", "-clisten_addresses="]
        self._process = self._run("postgres", "-D", str(self._data), *sockets, *options)
        give_up_at = time.monotonic() + START_SECONDS
        while True:
            try:
                psycopg.connect(self.url("postgres")).close()
                return
            except psycopg.OperationalError:
                if self._process.poll() is not None or time.monotonic() > give_up_at:
                    raise RuntimeError((self._folder / "log").read_text(encoding="utf-8")) from None
                time.sleep(0.05)

    def kill(self) -> None:
        """kill -9, and wait until all its processes are gone."""
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        self._process.kill()
        self._process.wait()
        for child in map(int, children):
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        while any(_is_running(child) for child in children):
            time.sleep(0.01)

    @contextmanager
    def database(self) -> Iterator[str]:
        """The URL of a database with empty tables. It is emptied and used again: a new one is slow."""
        if not self._idle:
            url = self.create_empty()
            database = PostgresDatabase(url)
            database.migrate()
            database.close()
            self._idle.append(url)
        url = self._idle.pop()
        yield url
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(EMPTY)
        self._idle.append(url)

    def create_empty(self) -> str:
        """A new database without tables; its URL."""
        self._made += 1
        name = f"test_{self._made}"
        self._execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        return self.url(name)

    def _execute(self, statement: sql.Composed) -> None:
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(statement)

    def _run(self, program: str, *arguments: str) -> "subprocess.Popen[bytes]":
        account = self._account
        with (self._folder / "log").open("ab") as log:
            return subprocess.Popen(
                [self._binaries / program, *arguments],
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
                user=account.pw_uid if account else None,
                group=account.pw_gid if account else None,
            )

    def _remove(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGQUIT)  # at once; there is nothing to keep
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(60)
        shutil.rmtree(self._folder, ignore_errors=True)


def _is_running(pid: str) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"  # nobody may be there to bury it


def _account() -> pwd.struct_passwd | None:
    """PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        return pwd.getpwnam("nobody")
