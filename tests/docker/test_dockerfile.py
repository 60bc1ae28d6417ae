"""docker/Dockerfile: clean for the linter, and an image that runs as an ordinary user on two volumes."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from configs.settings import Settings, variable_name
from tests.docker.dockerfile import DOCKERFILE, REPOSITORY, Stage, stages

SCRIPTS = Path(sys.executable).parent


@pytest.fixture(scope="module")
def image() -> Stage:
    return stages()[-1]


def test_hadolint_finds_nothing() -> None:
    config = REPOSITORY / "docker/hadolint.yaml"
    result = subprocess.run(
        [SCRIPTS / "hadolint", "--config", config, DOCKERFILE], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_runs_as_an_ordinary_user(image: Stage) -> None:
    assert image.only("USER").arguments == "1000:1000"
    names = [instruction.name for instruction in image.instructions]
    assert "RUN" not in names[names.index("USER") :]


def test_writes_only_to_its_two_volumes(image: Stage) -> None:
    env = image.pairs("ENV")
    assert image.only("VOLUME").json_form == ["/cache", "/data"]
    assert env["REELWRIGHT_DATA_DIR"] == "/data"
    caches = [env[name] for name in ("HF_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")]
    assert len(set(caches)) == 3
    assert all(Path("/cache") in Path(folder).parents for folder in caches)


def test_every_setting_named_exists(image: Stage) -> None:
    known = {variable_name(field) for field in Settings.model_fields}
    named = set(re.findall(r"REELWRIGHT_\w+", DOCKERFILE.read_text(encoding="utf-8")))
    assert {"REELWRIGHT_DATA_DIR", "REELWRIGHT_HOST", "REELWRIGHT_PORT"} <= named <= known
    assert "REELWRIGHT_ALLOW_UNAUTHENTICATED" not in named, (
        "an image that anyone can publish must ask for keys"
    )


def test_signals_reach_the_server(image: Stage) -> None:
    assert image.only("ENTRYPOINT").json_form == ["/opt/reelwright/bin/reelwright-entrypoint"]
    assert image.only("CMD").json_form == ["serve"]
    assert image.pairs("ENV")["PYTHONUNBUFFERED"] == "1"


def test_health_check_waits_for_a_slow_start(image: Stage) -> None:
    check = image.only("HEALTHCHECK")
    start_period = re.search(r"--start-period=(\d+)s", check.arguments)
    assert start_period is not None
    assert int(start_period[1]) >= 60
    assert "/health/live" in check.json_form[-1]


def test_holds_what_triton_needs_at_run_time(image: Stage) -> None:
    packages = re.search(r"apt-get install (.*?) &&", image.only("RUN").arguments)
    assert packages is not None
    assert {"gcc", "libc6-dev"} <= set(packages[1].split())


def test_label_states_the_version_of_the_project(image: Stage) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert image.pairs("LABEL")["org.opencontainers.image.version"] == project["version"]


def test_torch_requirement_is_found_by_the_builder() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pattern = re.search(r"grep '(.+?)' requirements.txt", DOCKERFILE.read_text(encoding="utf-8"))
    assert pattern is not None
    assert len([name for name in project["dependencies"] if re.search(pattern[1], name)]) == 1


def test_installs_what_a_cluster_needs() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (step,) = [run for run in stages()[0].all("RUN") if "tomllib" in run.arguments]
    command = ["sh", "-c", step.arguments.removesuffix("> requirements.txt")]
    printed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    extras = project["optional-dependencies"]
    assert printed.splitlines() == [*project["dependencies"], *extras["postgres"], *extras["s3"]]


@pytest.mark.parametrize("source", [path for stage in stages() for path in stage.copied()])
def test_what_is_copied_exists_and_is_in_the_build_context(source: str) -> None:
    ignore_file = (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert (REPOSITORY / source).exists()
    assert f"!{source}" in ignore_file
