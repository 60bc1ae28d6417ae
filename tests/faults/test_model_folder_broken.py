"""A model folder that is broken, breaks while the server runs, and is mended."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from configs.model_preset import find_model
from tests.faults import processes
from tests.faults.faulty_server import LONG, MODEL, Ending, FaultyServer
from tests.pipelines.broken import DAMAGED_CONTENT, DAMAGED_FILES

pytestmark = pytest.mark.alone

DAMAGES = {damage.name: damage for damage in (*DAMAGED_FILES, *DAMAGED_CONTENT)}
NOT_LOADED = "model_load_failed"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the bundled model that is cut short."""
    folder = tmp_path_factory.mktemp("models") / "model"
    mend(folder)
    DAMAGES["halved transformer/diffusion_pytorch_model.safetensors"].apply(folder)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[FaultyServer]:
    """A server with that folder."""
    preset = find_model(MODEL).model_copy(update={"source": str(folder)})
    path = tmp_path_factory.mktemp("presets") / "copied.yaml"
    path.write_text(yaml.safe_dump(preset.model_dump(mode="json")), encoding="utf-8")
    with FaultyServer(tmp_path_factory.mktemp("faults") / "data", model=path) as running:
        yield running


def mend(folder: Path) -> None:
    """Put the good files in place."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(Path(find_model(MODEL).folder or find_model(MODEL).source), folder)


def check_refused(server: FaultyServer, job_id: str, said: tuple[str, ...]) -> None:
    """The job failed for the right reason, and the server says it too."""
    message = server.finish(job_id)["error"]["message"]
    assert all(part in message for part in said)
    assert server.client.get("/health/live").status_code == 200
    ready = server.client.get("/health/ready")
    assert ready.status_code == 503
    assert said[0] in ready.json()["reason"]


def test_cut_short_before_the_start(server: FaultyServer, folder: Path) -> None:
    jobs = [server.start(), server.start(seed=2)]
    for job_id in jobs:
        server.expect(job_id, Ending(status="failed", code=NOT_LOADED))
        check_refused(server, job_id, ("is cut short or damaged",))
    mend(folder)
    server.wait_until_ready()  # without a restart
    server.check_sound()


def test_breaks_under_a_running_job(server: FaultyServer, folder: Path) -> None:
    damage = DAMAGES["lost tensor"]
    server.wait_until_ready()
    job_id = server.start(**LONG)
    processes.wait_until(lambda: server.row(job_id).step >= 2, "the job denoises")
    damage.apply(folder)
    server.expect(job_id, Ending(attempt=2, losses=1, status="failed", code=NOT_LOADED))
    processes.kill(server.worker_pid)
    check_refused(server, job_id, damage.said)
    mend(folder)
    server.wait_until_ready()
    server.check_sound()
