"""The command at a small size; and the committed scores: of these weights and defaults, and good enough."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from benchmarks.clips import weights_sha256
from benchmarks.prompt_following import main
from configs.attention import AttentionOverrides
from configs.job import JobParameters
from configs.model_preset import BUNDLED_MODEL, ModelPreset, find_model
from configs.resolve import GenerationRequest, resolve
from pipelines.bundled.drawing import render
from pipelines.bundled.training.clips import to_frames
from pipelines.bundled.world import held_out_specs
from pipelines.mp4 import write_mp4

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
COMMITTED, WINDOW = RESULTS / "prompt_following.json", RESULTS / "prompt_following_window.json"
SIDE, FRAMES = 96, 29
SMALL = ["--prompts", "2", "--steps", "2", "--size", f"{SIDE}x{SIDE}", "--num-frames", str(FRAMES)]
Command = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all runs of this file keep their clips: each goes on from what the last one left."""
    return tmp_path_factory.mktemp("clips")


@pytest.fixture
def command(clips: Path, tmp_path: Path) -> Command:
    """Runs the command with these flags and returns the content of its JSON file."""

    def run(*flags: str) -> dict[str, Any]:
        output = tmp_path / "found.json"
        main([*SMALL, "--device", "cpu", "--clips", str(clips), "--json", str(output), *flags])
        content: dict[str, Any] = json.loads(output.read_text())
        return content

    return run


def test_measures_both_attentions(command: Command, clips: Path, tmp_path: Path) -> None:
    sheet = tmp_path / "sheet.png"
    found = command("--dense-steps", "1", "--sheet", str(sheet))
    dense, default = found["runs"]["dense"], found["runs"]["default"]
    assert (dense["attention"]["sparse_calls"], dense["attention"]["dense_calls"]) == (0, 16)
    assert (default["attention"]["sparse_calls"], default["attention"]["dense_calls"]) == (8, 8)
    for run in (dense, default):
        assert run["score"]["clips"] == 2
        assert run["score"]["all_five"] == 1 - len(run["wrong"]) / 2
        assert run["parameters"]["num_inference_steps"] == 2
    assert found["default_minus_dense"] == default["score"]["all_five"] - dense["score"]["all_five"]
    with Image.open(sheet) as picture:
        assert picture.size == (2 * 5 * SIDE, 2 * SIDE)
    assert len(list(clips.glob("*/*.mp4"))) == 4


def test_measures_any_attentions_beside_each_other(command: Command) -> None:
    found = command("--attention", "dense", "window", "--window", "1", "--dense-steps", "1")
    assert list(found["runs"]) == ["dense", "window"]
    dense, window = found["runs"]["dense"], found["runs"]["window"]
    assert (window["attention"]["window"], window["attention"]["global_frames"]) == ([1, 1], 1)
    assert (window["attention"]["sparse_calls"], dense["attention"]["sparse_calls"]) == (8, 0)
    assert found["window_minus_dense"] == window["score"]["all_five"] - dense["score"]["all_five"]
    assert "default_minus_dense" not in found


def test_goes_on_from_kept_clips_and_scores_what_their_files_show(command: Command, clips: Path) -> None:
    """Files in place of those that a first run made: one with what was asked, one with something else."""
    first = command("--attention", "dense")
    right, other = held_out_specs()[0], held_out_specs()[2]
    drawn = render(
        (right, other), torch.Generator().manual_seed(0), height=SIDE, width=SIDE, num_frames=FRAMES
    )
    for number, frames in enumerate(to_frames(drawn)):
        write_mp4(frames, clips / "dense" / f"{number:03d}.mp4", 16)
    again = command("--attention", "dense")
    assert again["runs"]["dense"]["seconds"] == first["runs"]["dense"]["seconds"]
    assert again["runs"]["dense"]["score"]["all_five"] == 0.5
    assert [wrong["seed"] for wrong in again["runs"]["dense"]["wrong"]] == [1]
    assert again["runs"]["dense"]["wrong"][0]["shown"]["shape"] == other.shape


def test_makes_a_clip_anew_for_another_setting(command: Command, clips: Path) -> None:
    command("--attention", "default")
    before = (clips / "default" / "000.mp4").read_bytes()
    found = command("--attention", "default", "--block-size", "144", "--dense-steps", "1")
    assert found["runs"]["default"]["attention"]["block_size"] == 144
    assert (clips / "default" / "000.mp4").read_bytes() != before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--size", "100x96"], "width 100 is not a multiple of 16"),
        (["--attention", "dense", "--block-size", "64"], "block_size has no effect"),
        (["--window", "2"], "window has no effect with --attention dense default"),
        (["--attention", "window", "--window", "-2"], "window"),
        (["--block-size", "many"], "block_size"),
        (["--prompts", "0"], "--prompts"),
    ],
)
def test_names_what_is_wrong(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(flags)
    assert message in capsys.readouterr().err


@pytest.fixture
def bundled() -> ModelPreset:
    """The preset of the bundled model."""
    return find_model(BUNDLED_MODEL)


def test_committed_scores_are_of_what_is_served(bundled: ModelPreset) -> None:
    committed = json.loads(COMMITTED.read_text())
    assert bundled.folder is not None
    assert committed["weights_sha256"] == weights_sha256(bundled.folder)
    served = resolve(GenerationRequest(prompt="any", seed=0), bundled, bundled.attention)
    assert _parameters_of(committed["runs"]["default"]) == served
    dense = _parameters_of(committed["runs"]["dense"])
    assert dense.attention.backend == "dense"
    assert dense.model_copy(update={"attention": served.attention}) == served


def _parameters_of(run: dict[str, Any]) -> JobParameters:
    """Of its jobs; settings that there were none of when it ran have the values that mean what it did."""
    return JobParameters.model_validate(
        run["parameters"] | {"model": BUNDLED_MODEL, "prompt": "any", "seed": 0}
    )


def test_committed_scores_of_the_window(bundled: ModelPreset) -> None:
    """Of these weights and of what a request for the window gets."""
    committed = json.loads(WINDOW.read_text())
    assert bundled.folder is not None
    assert committed["weights_sha256"] == weights_sha256(bundled.folder)
    run = committed["runs"]["window"]
    asked = GenerationRequest(prompt="any", seed=0, attention=AttentionOverrides(backend="window"))
    assert _parameters_of(run) == resolve(asked, bundled, bundled.attention)
    assert run["score"]["clips"] == 200
    assert run["score"]["all_five"] >= 0.95
    assert run["attention"]["sparse_calls"] > 0


def test_committed_scores_are_good_enough() -> None:
    committed = json.loads(COMMITTED.read_text())
    dense, default = (committed["runs"][name] for name in ("dense", "default"))
    assert dense["score"]["clips"] == default["score"]["clips"] == 200
    assert dense["score"]["all_five"] >= 0.95
    assert committed["default_minus_dense"] >= -0.02
    assert default["attention"]["sparse_calls"] > 0
