"""A real S3 server (moto's) in its own process, and one bucket in it."""

import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from server.storage.marker import NAME as MARKER
from server.storage.objects import ObjectVideoStore
from server.storage.opening import open_objects
from tests.server.running_server import free_port

NAME = "clips"
PREFIX = "some/prefix"
URL = f"s3://{NAME}/{PREFIX}"
START_SECONDS = 120.0
# A request without a signature is a stranger's; moto looks no closer at one.
SIGNED = {"Authorization": "AWS key:"}


class Bucket:
    """Started on entry to a ``with`` block, ended on exit."""

    def __init__(self) -> None:
        self.port = free_port()
        self._url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        program = Path(sys.executable).with_name("moto_server")
        self._process = subprocess.Popen(
            [program, "-H", "127.0.0.1", "-p", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        give_up_at = time.monotonic() + START_SECONDS
        while not self._answers():
            assert self._process.poll() is None
            assert time.monotonic() < give_up_at
            time.sleep(0.05)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def empty(self) -> None:
        """Forget everything, and make the bucket again."""
        httpx.post(f"{self._url}/moto-api/reset").raise_for_status()
        httpx.put(f"{self._url}/{NAME}").raise_for_status()

    def variables(self, port: int | None = None) -> dict[str, str]:
        """The environment of a process that uses the bucket, through a proxy's port if one is given."""
        return {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port or self.port}",
        }

    def names(self, prefix: str = PREFIX) -> list[str]:
        """Names of all objects below the prefix, without it and without the marker of the database."""
        answer = httpx.get(f"{self._url}/{NAME}", params={"list-type": "2", "prefix": f"{prefix}/"})
        keys = [part.partition("</Key>")[0] for part in answer.text.split("<Key>")[1:]]
        return sorted(key.removeprefix(f"{prefix}/") for key in keys if not key.endswith(f"/{MARKER}"))

    def read(self, name: str) -> httpx.Response:
        """An object, past all of Reelwright."""
        return httpx.get(f"{self._url}/{NAME}/{PREFIX}/{name}", headers=SIGNED)

    def write(self, name: str, data: bytes) -> None:
        """Put an object there, past all of Reelwright."""
        httpx.put(f"{self._url}/{NAME}/{PREFIX}/{name}", content=data, headers=SIGNED).raise_for_status()

    def unfinished_uploads(self) -> int:
        """Multipart uploads that were neither completed nor given up."""
        return httpx.get(f"{self._url}/{NAME}?uploads").text.count("<Upload>")

    def store(self, link_seconds: int = 0) -> ObjectVideoStore:
        """The bucket as Reelwright sees it; the environment must hold ``variables``."""
        return open_objects(URL, link_seconds)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self._url}/moto-api/").status_code == 200
        except httpx.TransportError:
            return False
