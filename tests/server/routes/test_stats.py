"""``/metrics`` and ``/v1/stats``."""

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.server.running_server import RunningServer


def samples(client: httpx.Client) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of /metrics by name and labels."""
    text = client.get("/metrics").text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_job_shows_in_the_metrics(server: RunningServer, client: httpx.Client) -> None:
    model = ("model", "tiny-wan")
    done = ("reelwright_jobs_total", (model, ("status", "completed")))
    step = ("reelwright_denoise_step_duration_seconds_count", (("attention", "anchor_local"), model))
    before = samples(client)
    video = server.wait_for_job(server.submit(num_inference_steps=4)["id"], "completed")
    after = samples(client)
    assert after[done] == before.get(done, 0) + 1
    assert after[step] == before.get(step, 0) + 4
    memory = ("reelwright_peak_memory_bytes", (("device", "cpu"), model))
    assert after[memory] == video["metrics"]["peak_memory_bytes"]
    density = ("reelwright_attention_density", (("backend", "anchor_local"), model))
    assert after[density] == video["attention"]["ran"]["density"]
    ran = video["attention"]["ran"]
    for kind, reason, implementation, calls in [
        ("sparse", "", ran["implementation"], ran["sparse_calls"]),
        *(("dense", why, "sdpa", times) for why, times in ran["dense_reasons"].items()),
    ]:
        assert calls > 0
        labels = {"backend": "anchor_local", "kind": kind, "reason": reason, "precision": "full"}
        labels |= {"model": "tiny-wan", "implementation": implementation}
        name = ("reelwright_attention_calls_total", tuple(sorted(labels.items())))
        assert after[name] == before.get(name, 0) + calls
    assert after["reelwright_worker_up", (model,)] == 1
    assert after["reelwright_model_load_duration_seconds_count", (model,)] >= 1
    for stage in ("text_encode", "denoise", "vae_decode", "encode_mp4"):
        assert after["reelwright_stage_duration_seconds_count", (model, ("stage", stage))] >= 1


def test_the_promised_names_are_there(server: RunningServer, client: httpx.Client) -> None:
    server.wait_for_job(server.submit()["id"], "completed")
    client.post("/v1/videos", json={})
    names = {name for name, _ in samples(client)}
    assert names >= {
        f"reelwright_{name}"
        for name in (
            "jobs_queued",
            "jobs_running",
            "oldest_queued_age_seconds",
            "jobs_total",
            "jobs_rejected_total",
            "job_queue_wait_seconds_bucket",
            "job_duration_seconds_bucket",
            "stage_duration_seconds_bucket",
            "denoise_step_duration_seconds_bucket",
            "peak_memory_bytes",
            "attention_density",
            "attention_calls_total",
            "realtime_factor",
            "model_load_duration_seconds_bucket",
            "worker_up",
            "build_info",
            "http_request_duration_seconds_bucket",
        )
    }


def test_labels_hold_templates_and_no_ids_or_prompts(server: RunningServer, client: httpx.Client) -> None:
    job_id = server.submit(prompt="a secret triangle")["id"]
    server.wait_for_job(job_id, "completed")
    client.get("/v1/nothing/of/that/name")
    text = client.get("/metrics").text
    assert 'route="/v1/videos/{video_id}"' in text
    assert 'route="unmatched"' in text
    assert job_id not in text
    assert "secret" not in text
    assert "nothing/of" not in text


def test_queued_and_running_jobs_are_gauges(server: RunningServer, client: httpx.Client) -> None:
    ids = [server.submit_long()["id"] for _ in range(3)]
    server.wait_for_job(ids[0], "in_progress")
    model = (("model", "tiny-wan"),)
    now = samples(client)
    assert now["reelwright_jobs_queued", model] == 2
    assert now["reelwright_jobs_running", model] == 1
    assert now["reelwright_oldest_queued_age_seconds", model] > 0
    for job_id in ids[::-1]:
        client.delete(f"/v1/videos/{job_id}")
    assert samples(client)["reelwright_jobs_queued", model] == 0


def test_stats_say_the_same_for_people(server: RunningServer, client: httpx.Client) -> None:
    video = server.wait_for_job(server.submit()["id"], "completed")
    stats = client.get("/v1/stats").json()
    (model,) = stats["models"]
    assert model["model"] == "tiny-wan"
    assert (model["worker"]["state"], model["worker"]["device"]) == ("ready", "cpu")
    assert model["worker"]["load_seconds"] > 0
    assert model["last_step_seconds"] == video["metrics"]["last_step_seconds"]
    assert model["last_peak_memory_bytes"] == video["metrics"]["peak_memory_bytes"]
    assert model["last_attention"] == video["attention"]["ran"]
    assert model["density_by_backend"]["anchor_local"] == video["attention"]["ran"]["density"]
    assert model["median_step_seconds"] > 0
