"""The lock on a data folder."""

import multiprocessing
import os
import subprocess
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from server import lock
from server.lock import DataFolderInUseError, FolderLock, acquire


def hold(shared: FolderLock, pipe: "Connection[None, None]") -> None:
    """In a process of its own: keep a share of the lock until told to end."""
    pipe.send(None)
    pipe.recv()
    assert shared is not None


def test_a_living_server_keeps_others_out(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    owner = multiprocessing.get_context("spawn").Process(target=acquire_and_wait, args=(path,))
    owner.start()
    while not (path.exists() and path.read_text()):
        owner.join(0.01)
    with pytest.raises(DataFolderInUseError, match=f"process {owner.pid}"):
        acquire(path)
    owner.kill()
    owner.join()
    acquire(path).release()


def acquire_and_wait(path: Path) -> None:
    """In a process of its own: lock and never let go."""
    acquire(path)
    while True:
        os.read(multiprocessing.parent_process().sentinel, 1)  # type: ignore[union-attr]


def test_a_child_shares_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "PATIENCE_SECONDS", 0.2)
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    held = acquire(tmp_path / "lock")
    child = spawn.Process(target=hold, args=(held, theirs))
    child.start()
    ours.recv()
    held.release()
    with pytest.raises(DataFolderInUseError):
        acquire(tmp_path / "lock")
    ours.send(None)
    child.join()
    acquire(tmp_path / "lock").release()


def test_a_dead_server_is_waited_for_even_if_its_parent_ignores_its_death(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    path = tmp_path / "lock"
    held = acquire(path)
    child = spawn.Process(target=hold, args=(held, theirs))
    child.start()
    ours.recv()
    held.release()
    with subprocess.Popen(["true"]) as zombie:
        while Path(f"/proc/{zombie.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            child.join(0.01)
        path.write_text(f"{zombie.pid}\n")
        threading.Timer(0.3, ours.send, (None,)).start()
        acquire(path).release()
    child.join()
