"""The image without an engine: the installed project on a read-only root with three writable folders."""

import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.docker.dockerfile import REPOSITORY, stages

ENTRYPOINT = REPOSITORY / "docker/entrypoint.sh"
SCRIPT = Path(__file__).with_suffix(".sh")
UID = 1000


def install(wheel: Path, environment: Path) -> None:
    """Make a virtual environment of the wheel that borrows the dependencies of the running one."""
    _run(sys.executable, "-m", "venv", "--without-pip", environment)
    (packages,) = environment.glob("lib/python3*/site-packages")
    (own_packages,) = Path(sys.prefix).glob("lib/python3*/site-packages")
    (packages / "dependencies.pth").write_text(f"{own_packages}\n", encoding="utf-8")
    _run(sys.executable, "-m", "pip", "--python", environment / "bin/python", "install", "--no-deps", wheel)


@dataclass(frozen=True)
class BareRoot:
    """Runs docker/entrypoint.sh as uid 1000, with the image's variables and no other."""

    environment: Path
    folder: Path

    def __post_init__(self) -> None:
        (self.folder / "root").mkdir()
        for each in (self.cache, self.data, self.files):
            each.mkdir()
            os.chown(each, UID, UID)

    @property
    def cache(self) -> Path:
        """The folder that is /cache."""
        return self.folder / "cache"

    @property
    def data(self) -> Path:
        """The folder that is /data."""
        return self.folder / "data"

    @property
    def files(self) -> Path:
        """The folder that is /files."""
        return self.folder / "files"

    @property
    def python(self) -> Path:
        """The interpreter that has the project installed."""
        return self.environment / "bin/python"

    @property
    def log(self) -> str:
        """What was started has printed this so far."""
        return (self.folder / "log").read_text(encoding="utf-8")

    def start(
        self, *arguments: str, variables: dict[str, str], shown: Iterable[Path] = ()
    ) -> subprocess.Popen[bytes]:
        """Run the entry point with these arguments and, beside the image's own, these variables.

        It sees the folders ``shown`` at their own paths and cannot write there.
        """
        image = stages()[-1].pairs("ENV")
        path = f"{self.environment}/bin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        installed = {Path(sys.prefix), Path(sys.base_prefix), self.environment, ENTRYPOINT.parent}
        writable = (self.folder / "root", self.cache, self.data, self.files)
        places = (*writable, *sorted({*installed, *shown}))
        with (self.folder / "log").open("a", encoding="utf-8") as log:
            return subprocess.Popen(
                ["unshare", "--mount", "sh", SCRIPT, *places, "--", ENTRYPOINT, *arguments],
                env={**image, "PATH": path, **variables},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def _run(*command: str | Path) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
