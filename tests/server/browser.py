"""A headless Chromium, driven over its DevTools protocol.

Knows: how to start it, open a page and run a script there. Does not know: what the script is for.
"""

import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from websockets.sync.client import ClientConnection, connect

COMMANDS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
ANSWER_SECONDS = 60.0


def browser_command() -> str:
    """The program. Without one the test is skipped, but not in CI, which installs it."""
    found = next((path for name in COMMANDS if (path := shutil.which(name))), None)
    if found is None:
        message = "no Chromium: apt-get install chromium-headless-shell"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return found


class Browser:
    """Started on entry to a ``with`` block, ended on exit."""

    def __init__(self, profile: Path) -> None:
        self._command = [
            *(browser_command(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--remote-debugging-port=0", f"--user-data-dir={profile}"),
            *("--autoplay-policy=no-user-gesture-required", "about:blank"),
        ]
        self._ending = contextlib.ExitStack()
        self._numbers = itertools.count(1)
        self._events: list[str] = []
        self._process: subprocess.Popen[str] | None = None
        self._devtools: ClientConnection | None = None

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        said = ""
        for line in self._process.stderr:
            said += line
            if match := re.search(r"DevTools listening on (ws://\S+)", line):
                self._devtools = self._ending.enter_context(connect(match[1], max_size=None, proxy=None))
                return self
        raise AssertionError(f"the browser did not start: {said}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._ending.close()
        self._process.terminate()
        self._process.wait(30)
        assert self._process.stderr is not None
        self._process.stderr.close()

    def run(self, page: str, script: str) -> Any:
        """Open a page and give back what an async function body returns there, or ``{"error": text}``."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call("Page.enable", session)
        self._events.clear()
        self._call("Page.navigate", session, url=page)
        self._wait_for_event("Page.loadEventFired")
        guarded = f"(async () => {{ try {{ {script} }} catch (e) {{ return {{error: String(e)}} }} }})()"
        answer = self._call(
            "Runtime.evaluate", session, expression=guarded, awaitPromise=True, returnByValue=True
        )
        self._call("Target.closeTarget", targetId=target)
        return answer["result"]["value"]

    def _call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        assert self._devtools is not None
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        self._devtools.send(json.dumps(message if session is None else message | {"sessionId": session}))
        while (answer := self._receive()).get("id") != number:
            self._events.append(answer["method"])
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _wait_for_event(self, name: str) -> None:
        while name not in self._events:
            self._events.append(self._receive()["method"])

    def _receive(self) -> dict[str, Any]:
        assert self._devtools is not None
        message: dict[str, Any] = json.loads(self._devtools.recv(ANSWER_SECONDS))
        return message
