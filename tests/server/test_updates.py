"""What a client may rely on when the server is updated or set up anew between two requests."""

from pathlib import Path

import yaml

from configs.model_preset import ModelPreset
from tests.server.running_server import RunningServer

KEY = {"Idempotency-Key": "once"}
BODY = {"prompt": "a red circle", "num_inference_steps": 900}


def with_steps(preset: ModelPreset, folder: Path, most: int) -> Path:
    """The model with another limit of steps, as a file."""
    limits = preset.limits.model_copy(update={"max_num_inference_steps": most})
    path = folder / f"{most}.yaml"
    changed = preset.model_copy(update={"limits": limits})
    path.write_text(yaml.safe_dump(changed.model_dump(mode="json")), encoding="utf-8")
    return path


def test_a_repeated_submission_is_answered_though_it_would_be_refused_now(
    tmp_path: Path, preset: ModelPreset
) -> None:
    data_dir = tmp_path / "data"
    flags = ("--drain-seconds", "0")
    with RunningServer(data_dir, with_steps(preset, tmp_path, 1000), *flags) as before:
        made = before.client.post("/v1/videos", json=BODY, headers=KEY)
        assert made.status_code == 202
    with RunningServer(data_dir, with_steps(preset, tmp_path, 100), *flags) as after:
        again = after.client.post("/v1/videos", json=BODY, headers=KEY)
        assert (again.status_code, again.json()["id"]) == (200, made.json()["id"])
        other = after.client.post("/v1/videos", json=BODY | {"seed": 1}, headers=KEY)
        assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_conflict")
        assert after.client.post("/v1/videos", json=BODY).status_code == 400
