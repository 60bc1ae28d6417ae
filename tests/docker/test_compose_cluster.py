"""compose.cluster.yaml as Compose reads it: which host runs what, with which settings."""

from typing import Any

import pytest

from server.database.postgres import MOST_CONNECTIONS
from tests.docker.compose import compose, published, services, settable
from tests.docker.dockerfile import REPOSITORY

CLUSTER = ("compose.cluster.yaml",)
CPU = (*CLUSTER, "docker/compose.cluster-cpu.yaml")
NEEDED = {
    "REELWRIGHT_DATABASE_URL": "postgresql://reelwright:secret@postgres:5432/reelwright",
    "REELWRIGHT_STORAGE_URL": "s3://bucket/prefix",
}


def _services(
    *profiles: str, files: tuple[str, ...] = CLUSTER, **variables: str
) -> dict[str, dict[str, Any]]:
    return services(compose(files, REPOSITORY, profiles=profiles, **{**NEEDED, **variables}))


@pytest.mark.parametrize(
    ("profiles", "names"),
    [
        ((), set()),
        (("cluster",), {"postgres", "api", "worker"}),
        (("worker",), {"worker"}),
        (("postgres", "api"), {"postgres", "api"}),
    ],
)
def test_a_profile_says_what_a_host_runs(profiles: tuple[str, ...], names: set[str]) -> None:
    assert set(_services(*profiles)) == names


@pytest.mark.parametrize("missing", sorted(NEEDED))
@pytest.mark.parametrize("profile", ["cluster", "worker"])
def test_both_settings_are_asked_for(profile: str, missing: str) -> None:
    given = {**NEEDED, missing: ""}
    result = compose(CLUSTER, REPOSITORY, profiles=(profile,), **given)
    assert result.returncode != 0
    assert f"{missing} is missing a value: is needed, the same on every host" in result.stderr


def test_only_workers_get_gpus_and_as_many_as_are_said() -> None:
    found = _services("cluster", GPU_COUNT="2", CUDA_VISIBLE_DEVICES="1")
    assert found["worker"]["deploy"]["resources"]["reservations"]["devices"] == [
        {"driver": "nvidia", "count": 2, "capabilities": ["gpu"]}
    ]
    assert found["worker"]["environment"]["CUDA_VISIBLE_DEVICES"] == "1"
    assert found["api"]["deploy"]["resources"] == {}
    (device,) = _services("worker")["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["count"] == -1  # all


def test_cpu_override_takes_the_gpu_out_and_the_cpu_build_in() -> None:
    found = _services("cluster", files=CPU)
    assert "deploy" not in found["worker"]
    for name in ("api", "worker"):
        assert found[name]["build"]["args"] == {"TORCH_INDEX_URL": "https://download.pytorch.org/whl/cpu"}


def test_api_processes_run_nothing_and_have_a_port_each() -> None:
    api = _services("api", API_REPLICAS="3", API_PORTS="8000-8002")["api"]
    assert api["command"] == ["serve"]
    assert api["environment"]["REELWRIGHT_LOCAL_WORKER"] == "false"
    assert api["deploy"]["replicas"] == 3
    assert published(api) == [("127.0.0.1", "8000-8002", 8000)]
    assert published(_services("api", BIND_ADDRESS="10.0.0.1")["api"]) == [("10.0.0.1", "8000", 8000)]
    assert "/data" not in {volume["target"] for volume in api["volumes"]}


def test_an_api_without_keys_must_be_asked_for() -> None:
    assert _services("api")["api"]["environment"]["REELWRIGHT_ALLOW_UNAUTHENTICATED"] == "false"
    api = _services("api", REELWRIGHT_ALLOW_UNAUTHENTICATED="true")["api"]
    assert api["environment"]["REELWRIGHT_ALLOW_UNAUTHENTICATED"] == "true"


def test_a_worker_has_a_data_folder_and_room_for_nccl_and_no_http() -> None:
    worker = _services("worker")["worker"]
    assert worker["command"] == ["worker"]
    assert "ports" not in worker
    assert worker["healthcheck"] == {"disable": True}
    assert {"/cache", "/data", "/files"} <= {volume["target"] for volume in worker["volumes"]}
    assert int(worker["shm_size"]) >= 2**30
    assert worker["init"] is True


@pytest.mark.parametrize("name", ["api", "worker"])
def test_every_setting_can_be_given_and_no_other_is(name: str) -> None:
    environment = _services("cluster", AWS_ENDPOINT_URL="http://minio:9000")[name]["environment"]
    assert {variable for variable in environment if variable.startswith("REELWRIGHT_")} == settable()
    assert {variable: environment[variable] for variable in NEEDED} == NEEDED
    assert environment["AWS_ENDPOINT_URL"] == "http://minio:9000"
    assert environment["AWS_ACCESS_KEY_ID"] is None  # not set, so that the role of the host is found


def test_files_lie_in_a_volume_or_in_a_folder_that_hosts_share() -> None:
    for name in ("api", "worker"):
        (volume,) = [v for v in _services("cluster")[name]["volumes"] if v["target"] == "/files"]
        assert (volume["type"], volume["source"]) == ("volume", "files")
        shared = _services("cluster", FILES_FOLDER="/mnt/videos")[name]["volumes"]
        (folder,) = [v for v in shared if v["target"] == "/files"]
        assert (folder["type"], folder["source"]) == ("bind", "/mnt/videos")


def test_the_database_keeps_its_volume_and_is_waited_for_where_it_runs() -> None:
    found = _services("cluster", POSTGRES_PASSWORD="secret")
    postgres = found["postgres"]
    assert postgres["environment"]["POSTGRES_PASSWORD"] == "secret"
    assert [(v["source"], v["target"]) for v in postgres["volumes"]] == [
        ("postgres", "/var/lib/postgresql/data")
    ]
    assert postgres["healthcheck"]["test"][:2] == ["CMD", "pg_isready"]
    assert published(postgres) == [("127.0.0.1", "5432", 5432)]
    for name in ("api", "worker"):
        assert found[name]["depends_on"]["postgres"] == {"condition": "service_healthy", "required": False}


def test_the_database_has_room_for_many_processes() -> None:
    command = _services("postgres")["postgres"]["command"]
    most = int(command[-1].removeprefix("max_connections="))
    assert most >= 25 * (MOST_CONNECTIONS + 1)  # one more that listens
