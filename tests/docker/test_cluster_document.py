"""docs/cluster.md: what it tells people to set and to ask for exists."""

import re
import shutil
from pathlib import Path

import yaml
from prometheus_client import CollectorRegistry, generate_latest

from configs.settings import Settings, variable_name
from server.database import open_database
from server.metrics import JobCollector
from tests.docker.compose import compose, services
from tests.docker.dockerfile import REPOSITORY

DOCUMENT = (REPOSITORY / "docs/cluster.md").read_text(encoding="utf-8")
COMPOSE_FILES = sorted((REPOSITORY / "docker").glob("compose*.yaml"))
OF_CUDA = {"CUDA_VISIBLE_DEVICES"}
MODEL = "wan2.1-t2v-1.3b"


def _block(language: str, start: str) -> str:
    (found,) = re.findall(rf"```{language}\n({re.escape(start)}.*?)```", DOCUMENT, flags=re.DOTALL)
    return str(found)


def _copy_compose_files(folder: Path) -> None:
    shutil.copy(REPOSITORY / "compose.cluster.yaml", folder)
    shutil.copytree(REPOSITORY / "docker", folder / "docker")
    (folder / ".env").write_text(_block("sh", "POSTGRES_PASSWORD="), encoding="utf-8")


def test_the_env_file_is_read_from_the_repository_root(tmp_path: Path) -> None:
    _copy_compose_files(tmp_path)
    found = services(compose(("compose.cluster.yaml",), tmp_path, profiles=("cluster",)))
    for name in ("api", "worker"):
        environment = found[name]["environment"]
        assert (
            environment["REELWRIGHT_DATABASE_URL"] == "postgresql://reelwright:...@postgres:5432/reelwright"
        )
        assert environment["REELWRIGHT_STORAGE_URL"] == "s3://my-bucket/reelwright"
        assert environment["AWS_REGION"] == "eu-central-1"
        assert environment["REELWRIGHT_MODEL"] == MODEL
    assert found["postgres"]["environment"]["POSTGRES_PASSWORD"] == "..."


def test_a_second_worker_of_a_host_has_its_own_gpu_and_data_folder(tmp_path: Path) -> None:
    _copy_compose_files(tmp_path)
    (tmp_path / "gpus.yaml").write_text(_block("yaml", "services:"), encoding="utf-8")
    files = ("compose.cluster.yaml", "gpus.yaml")
    found = services(compose(files, tmp_path, profiles=("worker",), CUDA_VISIBLE_DEVICES="0"))
    first, second = found["worker"], found["worker-1"]
    gpus = [each["environment"].pop("CUDA_VISIBLE_DEVICES") for each in (first, second)]
    folders = [{v["target"]: v["source"] for v in each.pop("volumes")} for each in (first, second)]
    assert gpus == ["0", "1"]
    assert [folder.pop("/data") for folder in folders] == ["data", "data-1"]
    assert folders[0] == folders[1]
    assert first == second


def test_variables_exist() -> None:
    settings = {variable_name(field) for field in Settings.model_fields}
    assert set(re.findall(r"REELWRIGHT_[A-Z_0-9]+", DOCUMENT)) <= settings
    in_compose = set(re.findall(r"\$\{(\w+)", "\n".join(path.read_text() for path in COMPOSE_FILES)))
    named = set(re.findall(r"`([A-Z]+_[A-Z_]+)(?:=[^`]*)?`", DOCUMENT))
    assert {name for name in named if not name.startswith("REELWRIGHT_")} <= in_compose | OF_CUDA


def test_autoscaling_asks_for_metrics_of_the_model(tmp_path: Path) -> None:
    database = open_database(Settings(data_dir=tmp_path))
    database.migrate()
    registry = CollectorRegistry()
    registry.register(JobCollector(database, MODEL))
    shown = generate_latest(registry).decode()
    database.close()
    scaled = yaml.safe_load(_block("yaml", "apiVersion: keda.sh"))
    queries = " ".join(trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"])
    asked = set(re.findall(r"reelwright_\w+\{[^}]*\}", queries))
    assert len(asked) == 3
    assert {series for series in asked if f"\n{series} " not in shown} == set()
    for name in set(re.findall(r"`(reelwright_\w+)`", DOCUMENT)):
        assert f"\n{name}{{" in shown
