"""The event stream of a job."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from server.job import new_job_id
from tests.server.routes.test_videos import error_of
from tests.server.running_server import RunningServer


@dataclass(frozen=True)
class Event:
    """One server-sent event."""

    name: str
    id: int
    data: dict[str, Any]


def read_events(answer: httpx.Response) -> Iterator[Event]:
    """Events as they come; comments are left out."""
    fields: dict[str, str] = {}
    for line in answer.iter_lines():
        if line and not line.startswith(":"):
            name, _, value = line.partition(": ")
            fields[name] = value
        elif not line and fields:
            yield Event(fields["event"], int(fields["id"]), json.loads(fields["data"]))
            fields = {}


def test_a_jobs_life_from_snapshot_to_completed(server: RunningServer, client: httpx.Client) -> None:
    job_id = server.submit_long()["id"]
    with client.stream("GET", f"/v1/videos/{job_id}/events") as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = list(read_events(answer))
    assert events[0].name == "snapshot"
    assert events[-1].name == "completed"
    assert "\r" not in client.get(f"/v1/videos/{job_id}/events").text  # for grep and cut
    assert {event.name for event in events[1:-1]} <= {"status", "progress", "preview"}
    assert events[-1].data == server.job(job_id)
    ids = [event.id for event in events]
    assert ids == sorted(ids)
    progress = [event.data["progress"] for event in events if event.name != "preview"]
    assert progress == sorted(progress)
    steps = {event.data["step"] for event in events if event.name == "progress"}
    assert len(steps) > 3
    assert all(e.data["last_step_seconds"] > 0 for e in events if e.name == "progress" and e.data["step"])


def test_a_queued_job_tells_when_it_starts(server: RunningServer, client: httpx.Client) -> None:
    running, queued = server.submit_long()["id"], server.submit()["id"]
    server.wait_for_job(running, "in_progress")
    names = []
    with client.stream("GET", f"/v1/videos/{queued}/events") as answer:
        for event in read_events(answer):
            names.append((event.name, event.data.get("status")))
            if names == [("snapshot", "queued")]:
                httpx.post(f"{server.url}/v1/videos/{running}/cancel")
    assert names[:2] == [("snapshot", "queued"), ("status", "in_progress")]
    assert names[-1] == ("completed", "completed")


def test_a_stream_resumes_after_the_last_id(server: RunningServer, client: httpx.Client) -> None:
    job_id = server.submit_long()["id"]
    with client.stream("GET", f"/v1/videos/{job_id}/events") as answer:
        last = next(event for event in read_events(answer) if event.data["step"] >= 2)
    with client.stream(
        "GET", f"/v1/videos/{job_id}/events", headers={"last-event-id": str(last.id)}
    ) as answer:
        first = next(read_events(answer))
        assert first.id > last.id
    client.post(f"/v1/videos/{job_id}/cancel")
    with client.stream("GET", f"/v1/videos/{job_id}/events") as answer:
        final = list(read_events(answer))[-1]
    assert final.name == "cancelled"
    # Everything was seen: 204 tells a browser not to come back.
    headers = {"last-event-id": str(final.id)}
    assert client.get(f"/v1/videos/{job_id}/events", headers=headers).status_code == 204


def test_a_deleted_job_ends_its_streams(server: RunningServer, client: httpx.Client) -> None:
    job_id = server.submit_long()["id"]
    with client.stream("GET", f"/v1/videos/{job_id}/events") as answer:
        events = read_events(answer)
        next(events)
        httpx.delete(f"{server.url}/v1/videos/{job_id}")
        last = list(events)[-1]
    assert (last.name, last.data["id"]) == ("deleted", job_id)


def test_an_unknown_id_is_404(client: httpx.Client) -> None:
    error_of(client.get(f"/v1/videos/{new_job_id()}/events"), 404)
