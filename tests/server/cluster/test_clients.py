"""Clients written against the server of one host run unchanged against a cluster: two API processes that take
turns behind a balancer, and one real worker. The tests are those of the one server, with another fixture."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.postgres import PostgresServer
from tests.server.cluster.balancer import Balancer
from tests.server.cluster.processes import REAL, Cluster
from tests.server.routes.test_content import (  # noqa: F401
    content,
    test_a_download_is_resumed_only_if_the_file_is_the_same,
    test_a_known_file_is_not_sent_again,
    test_a_range,
    test_a_range_outside_the_file_is_416,
    test_an_unfinished_video_is_409,
    test_head_has_the_headers_of_get,
    test_the_file_is_whole_and_plays,
    video_id,
)
from tests.server.routes.test_events import (  # noqa: F401
    test_a_deleted_job_ends_its_streams,
    test_a_jobs_life_from_snapshot_to_completed,
    test_a_queued_job_tells_when_it_starts,
    test_a_stream_resumes_after_the_last_id,
)
from tests.server.routes.test_manifest import (  # noqa: F401
    manifest,
    test_it_makes_the_same_clip_again,
    test_it_says_what_ran,
    video,
)
from tests.server.routes.test_videos import (  # noqa: F401
    test_a_form_says_the_same_as_json,
    test_a_prompt_becomes_a_video,
    test_a_repeated_submission_is_one_job,
    test_a_running_job_is_cancelled_within_a_step,
    test_pages_link_up,
    test_the_same_seed_makes_the_same_file,
)
from tests.server.running_server import RunningServer
from tests.server.test_clients import test_curl_submits_watches_and_downloads  # noqa: F401
from tests.server.test_openai_client import (  # noqa: F401
    sdk,
    test_a_refusal_names_the_parameter,
    test_create_poll_download_and_delete,
    test_list_pages_by_itself,
    test_models_are_listed,
)

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API is scheduled:DeprecationWarning")


class Balanced(RunningServer):
    """The cluster as clients see it: one address."""

    def __init__(self, data_dir: Path, port: int) -> None:
        super().__init__(data_dir, "unused")
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, timeout=30)
        self.log.touch()


@pytest.fixture(scope="module")
def server(
    postgres: PostgresServer, model_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """What the tests take for the server."""
    folder = tmp_path_factory.mktemp("clients")
    (folder / "store").mkdir()
    with (
        postgres.database() as url,
        Cluster(folder, url, f"file://{folder / 'store'}", model=str(model_file), program=REAL) as cluster,
    ):
        worker = cluster.worker()
        ports = [cluster.api().port, cluster.api().port]
        cluster.wait_until_ready(worker)
        with Balancer(ports) as balancer:
            yield Balanced(folder / "clients", balancer.port)
            assert set(balancer.taken) == set(ports)
            assert max(balancer.taken.values()) - min(balancer.taken.values()) <= 1


@pytest.fixture(scope="module")
def client(server: RunningServer) -> httpx.Client:
    """A client of the cluster."""
    return server.client


@pytest.fixture
def either(server: RunningServer) -> tuple[RunningServer, str | None]:
    """The cluster; it asks for no key."""
    return server, None
