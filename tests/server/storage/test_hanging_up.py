"""A client that does not take all of a file: the rest is not read from the store."""

import threading
import time

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server.file_answer import StoredFile, answer_with
from server.storage.keys import ObjectKey
from server.storage.objects import READ_BYTES
from tests.server.running_server import free_port
from tests.server.samples import UNKNOWN_ID
from tests.server.storage.bucket import Bucket
from tests.server.storage.flaky_proxy import FlakyProxy

PIECES = 48
KEY = ObjectKey(UNKNOWN_ID, 1, "video")


def test_a_client_that_hangs_up_ends_the_reading(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.write(str(KEY), bytes(PIECES * READ_BYTES))
    file = StoredFile(KEY, PIECES * READ_BYTES, "0" * 64, "video/mp4", KEY.shown_name, 0.0)
    with FlakyProxy(bucket.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        store = bucket.store()

        async def answer(request: Request) -> Response:
            return await answer_with(request, file, store)

        port = free_port()
        app = Starlette(routes=[Route("/", answer)])
        server = uvicorn.Server(uvicorn.Config(app, port=port, log_config=None, ws="none"))
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            give_up_at = time.monotonic() + 60
            while not server.started:
                assert time.monotonic() < give_up_at
                time.sleep(0.02)
            with httpx.stream("GET", f"http://127.0.0.1:{port}/") as download:
                assert next(download.iter_raw()) != b""
        finally:
            server.should_exit = True
            thread.join()  # it waits for answers that are still being sent
        # The sockets' buffers hold a few pieces.
        assert 0 < sum(line.startswith("GET") for line in proxy.lines) < PIECES
