"""What clients and operators may rely on, the same over one host with SQLite and over several processes with
PostgreSQL: real processes, real kill -9, scripted workers."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.server.cluster.site import Site, events, open_site
from tests.server.databases import ENGINES

pytestmark = pytest.mark.alone

WAITING = "denoise step preview until:{name} finish"


@pytest.fixture(scope="module", params=ENGINES)
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A ready server of either size; tests leave it ready and idle."""
    postgres = request.getfixturevalue("postgres") if request.param == "postgres" else None
    with open_site(request.param, tmp_path_factory.mktemp("site"), postgres) as made:
        yield made


def test_a_job_is_seen_from_everywhere_at_every_moment(site: Site) -> None:
    job_id = site.submit(WAITING.format(name="seen"))
    site.wait_for_stage(job_id)
    site.second.wait_for(
        lambda: site.second.client.get(f"/v1/videos/{job_id}/content?variant=preview").status_code == 200
    )
    running = site.second.job(job_id)
    assert (running["status"], running["step"], running["attempt"]) == ("in_progress", 1, 1)
    assert site.second.client.get(f"/v1/videos/{job_id}/content").status_code == 409
    with ThreadPoolExecutor() as pool:
        streams = [pool.submit(events, api, job_id) for api in (site.first, site.second)]
        site.let("seen")
        seen = [stream.result() for stream in streams]
    done = site.second.job(job_id)
    for stream in seen:
        assert (stream[0][0], stream[-1][0]) == ("snapshot", "completed")
    assert len({stream[-1] for stream in seen}) == 1
    assert events(site.first, job_id, after=seen[1][-1][1]) == []  # resumed elsewhere: all was seen
    assert (done["status"], done["progress"]) == ("completed", 100)
    assert site.first.client.get(f"/v1/videos/{job_id}/content").content == b"whole"
    assert site.second.client.get(f"/v1/videos/{job_id}/content?variant=thumbnail").content == b"whole"
    assert job_id in [job["id"] for job in site.second.client.get("/v1/videos").json()["data"]]
    assert site.second.client.delete(f"/v1/videos/{job_id}").status_code == 200
    assert site.first.client.get(f"/v1/videos/{job_id}").status_code == 404


def test_the_same_submission_everywhere_at_once_is_one_job(site: Site) -> None:
    body, key = {"prompt": "denoise finish", "num_inference_steps": 3}, {"Idempotency-Key": "once"}
    with ThreadPoolExecutor(8) as pool:
        sent = [
            pool.submit(api.client.post, "/v1/videos", json=body, headers=key)
            for api in (site.first, site.second) * 4
        ]
        answers = [each.result() for each in sent]
    assert sorted(answer.status_code for answer in answers) == [200] * 7 + [202]
    assert len({answer.json()["id"] for answer in answers}) == 1
    site.second.wait_for_job(answers[0].json()["id"], "completed")


def test_cancel_and_delete_stop_a_job_from_anywhere(site: Site) -> None:
    running, queued = site.submit("denoise step"), site.submit("denoise finish")
    site.wait_for_stage(running)
    assert site.second.client.post(f"/v1/videos/{queued}/cancel").json()["status"] == "cancelled"
    assert site.second.client.post(f"/v1/videos/{running}/cancel").status_code == 202
    assert site.first.wait_for_job(running)["status"] == "cancelled"
    deleted = site.submit("denoise step")
    site.wait_for_stage(deleted)
    assert site.second.client.delete(f"/v1/videos/{deleted}").status_code == 200
    last = site.submit("denoise finish")
    assert site.second.wait_for_job(last)["attempt"] == 1


def test_higher_priorities_come_first(site: Site) -> None:
    first = site.submit("denoise until:order finish")
    site.wait_for_stage(first)
    low, high = site.submit("denoise finish"), site.submit("denoise finish", priority=5)
    assert (site.second.job(high)["queue_position"], site.second.job(low)["queue_position"]) == (1, 2)
    site.let("order")
    site.second.wait_for_job(low, "completed")
    assert site.second.job(high)["started_at"] <= site.second.job(low)["started_at"]
    assert events(site.second, high)[-1][0] == "completed"


def test_a_killed_workers_job_runs_again_and_a_second_death_fails_it(site: Site) -> None:
    once = site.submit(WAITING.format(name="again"))
    site.wait_for_stage(once)
    site.kill_worker()
    site.second.wait_for(lambda: site.second.job(once)["attempt"] == 2)
    site.let("again")
    assert site.second.wait_for_job(once)["status"] == "completed"
    failed = site.second.wait_for_job(site.submit("denoise die"))
    assert (failed["attempt"], failed["status"], failed["error"]["code"]) == (2, "failed", "worker_lost")
    site.first.wait_until_ready()


def test_a_killed_api_loses_no_job(site: Site) -> None:
    running = site.submit(WAITING.format(name="api"))
    queued = site.submit("denoise finish")
    site.wait_for_stage(running)
    site.kill_api()
    site.let("api")
    done = site.first.wait_for_job(running)
    # On one host the worker ends with its API; beside others nobody notices.
    attempts = 2 if site.worker is None else 1
    assert (done["status"], done["attempt"]) == ("completed", attempts)
    assert site.second.wait_for_job(queued)["status"] == "completed"
    site.first.wait_until_ready()


def test_a_drained_job_is_queued_again_without_blame(site: Site) -> None:
    job_id = site.submit("denoise checkpoint until:drained resumed finish")
    site.second.wait_for(lambda: site.second.job(job_id)["checkpoint_step"] == 1)
    site.drain()
    site.let("drained")
    done = site.second.wait_for_job(job_id)
    assert (done["status"], done["attempt"]) == ("completed", 2)
    assert site.second.client.get(f"/v1/videos/{job_id}/content").content == b"after latents"
