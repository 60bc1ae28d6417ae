"""Asks Compose how it reads the files of a folder.

Knows: its command, and its answer. Does not know: what the files should say.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from configs.settings import Settings, variable_name
from configs.sources import CONFIG_VARIABLE

FIXED_IN_THE_IMAGE = {"REELWRIGHT_DATA_DIR", "REELWRIGHT_HOST", "REELWRIGHT_PORT"}


def compose(
    files: tuple[str, ...], folder: Path, *, profiles: tuple[str, ...] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run ``config`` on these files of a folder, with these variables and no others."""
    chosen = [word for name in files for word in ("--file", name)]
    chosen += [word for name in profiles for word in ("--profile", name)]
    return subprocess.run(
        [*_command(), *chosen, "config", "--format", "json"],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def services(result: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    """The services by name, of a run that must have gone well."""
    assert result.returncode == 0, result.stderr
    found: dict[str, dict[str, Any]] = json.loads(result.stdout)["services"]
    return found


def settable() -> set[str]:
    """The variables of all settings that are left to whoever starts the image."""
    return {variable_name(field) for field in Settings.model_fields} - FIXED_IN_THE_IMAGE | {CONFIG_VARIABLE}


def seconds(duration: str) -> int:
    """Of a duration as Compose prints it, such as 1m0s."""
    match = re.fullmatch(r"(?:(\d+)m)?(?:(\d+)s)?", duration)
    assert match is not None, duration
    minutes, rest = match.groups(default="0")
    return 60 * int(minutes) + int(rest)


def published(service: dict[str, Any]) -> list[tuple[str, str, int]]:
    """Address and port on the host and port in the container, of each published port."""
    return [(port["host_ip"], port["published"], port["target"]) for port in service["ports"]]


def _command() -> list[str]:
    spec = importlib.util.find_spec("compose")
    if spec is not None and spec.origin is not None:
        # The package's own command hides the exit status of the program that it wraps.
        return [str(Path(spec.origin).with_name("docker-compose"))]
    plugin = ["docker", "compose"]
    if shutil.which("docker") and subprocess.run([*plugin, "version"], check=False).returncode == 0:
        return plugin
    pytest.skip("no Compose: the dev extra brings one on Linux x86-64, Docker elsewhere")
