"""``reelwright profile`` of the tiny model on a CPU."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from rich.console import Console

from configs.resolve import GenerationRequest
from configs.settings import Settings, SettingsError
from pipelines.profiling import KINDS
from server.profile import plan_profile, run_profile

REQUEST = GenerationRequest(prompt="a red circle", seed=0)


def settings(model_file: Path) -> Settings:
    """The tiny model on a CPU."""
    return Settings(model=str(model_file), device="cpu", dtype="float32")


def test_it_takes_a_step_apart(model_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "step.json"
    run_profile(plan_profile(settings(model_file), REQUEST, output), Console(quiet=True))
    found = json.loads(output.read_text(encoding="utf-8"))
    assert (found["model"], found["device"], found["dtype"]) == ("tiny-wan", "cpu", "float32")
    assert (found["width"], found["height"], found["num_frames"], found["tokens"]) == (64, 64, 9, 48)
    # Every self-attention call of all three steps was as the setting says, none dense for being early.
    assert (found["attention"]["backend"], found["attention"]["sparse_calls"]) == ("anchor_local", 6)
    assert found["attention"]["dense_calls"] == 0
    by_kind = found["seconds_by_kind"]
    assert set(by_kind) == set(KINDS)
    assert all(by_kind[kind] > 0 for kind in ("attention", "linear", "elementwise"))
    assert sum(by_kind.values()) == pytest.approx(found["kernel_seconds"])
    tops = found["top"]
    assert [entry["seconds"] for entry in tops] == sorted((e["seconds"] for e in tops), reverse=True)
    # Two layers: q, k, v and out of both attentions, and two of the feed-forward; four of text and time, and
    # the last one.
    (linear,) = [entry for entry in tops if entry["name"] == "aten::addmm"]
    assert (linear["kind"], linear["calls"]) == ("linear", 2 * (4 + 4 + 2) + 5 + 1)
    assert found["peak_memory_bytes"] > 0
    picture = ElementTree.parse(tmp_path / "step.svg").getroot()
    assert picture.tag.endswith("svg")
    assert "anchor_local" in "".join(picture.itertext())


@pytest.mark.parametrize(
    ("name", "said"), [("step.txt", "must end in .json"), ("absent/step.json", "existing folder")]
)
def test_a_wrong_output_is_refused_first(model_file: Path, tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        plan_profile(settings(model_file), REQUEST, tmp_path / name)


def test_a_wrong_size_is_refused_first(model_file: Path, tmp_path: Path) -> None:
    request = GenerationRequest(prompt="x", size="100x100")
    with pytest.raises(SettingsError, match="nearest valid"):
        plan_profile(settings(model_file), request, tmp_path / "step.json")
