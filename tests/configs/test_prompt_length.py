"""What is cut off a prompt, said without the model: the same as the worker says with it."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.model_preset import BUNDLED_MODEL, ModelPreset, find_model
from configs.prompt_length import TokenizerNotFoundError, clean_prompt, cut_words
from pipelines import LoadedPipeline, load_pipeline
from pipelines.text import cut_warning

TEXTS = [
    "",
    "a red circle",
    "red " * 200,
    "&amp;lt; &lt; \u00a0 red\u2003blue\x85\x1c\x1f green \u200b \u2028 ",
    "schÃ¶n \ufb01n e\u0301 \u201cquoted\u201d 影 🌀" * 9,
    "up, down! " * 20,
]


@pytest.fixture(scope="module")
def bundled() -> LoadedPipeline:
    """The bundled model, as a worker has it."""
    return load_pipeline(find_model(BUNDLED_MODEL), device="cpu", dtype="float32")


@pytest.mark.parametrize("text", TEXTS)
def test_it_is_what_the_worker_says(bundled: LoadedPipeline, text: str) -> None:
    assert cut_words(bundled.preset, "prompt", text) == cut_warning(bundled, "prompt", text)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.one_of(st.text(), st.sampled_from(["red", " ", "\t", "\x1c", "\x85", "&amp;", "&#28;", "circle"]))
    ).map(" ".join)
)
def test_it_is_what_the_worker_says_of_any_text(bundled: LoadedPipeline, text: str) -> None:
    assert clean_prompt(text) == prompt_clean(text)
    assert cut_words(bundled.preset, "prompt", text) == cut_warning(bundled, "prompt", text)


def test_the_sentence() -> None:
    prompt = "red " * 31 + "blue, and more"
    assert cut_words(find_model(BUNDLED_MODEL), "negative_prompt", prompt) == (
        "negative_prompt: 31 of 35 text tokens are used; cut: 'blue, and more'"
    )


def test_many_threads_may_ask() -> None:
    preset = find_model(BUNDLED_MODEL)
    texts = ["red " * count for count in range(60)]
    expected = [cut_words(preset, "prompt", text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda text: cut_words(preset, "prompt", text), texts * 5)) == expected * 5


def test_a_model_in_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0fad780a534b6463e45facd96134c9f345acfa5b"
    bundled_preset = find_model(BUNDLED_MODEL)
    assert bundled_preset.folder is not None
    repository = tmp_path / "models--someone--tiny"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    preset = bundled_preset.model_copy(update={"source": "someone/tiny"})
    with pytest.raises(TokenizerNotFoundError, match=r"someone/tiny is not in the hub's cache"):
        cut_words(preset, "prompt", "red " * 40)
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text(commit)
    (repository / "snapshots").mkdir()
    os.symlink(bundled_preset.folder, repository / "snapshots" / commit, target_is_directory=True)
    assert cut_words(preset, "prompt", "red " * 40) == cut_words(bundled_preset, "prompt", "red " * 40)


def test_a_tokenizer_that_is_missing_or_broken_is_said(tmp_path: Path) -> None:
    preset = find_model(BUNDLED_MODEL)
    assert preset.folder is not None
    (tmp_path / "tokenizer").mkdir()
    shutil.copy(preset.folder / "model_index.json", tmp_path)
    broken = ModelPreset(name="broken", source=str(tmp_path))
    with pytest.raises(TokenizerNotFoundError, match=r"tokenizer\.json is missing"):
        cut_words(broken, "prompt", "red")
    (tmp_path / "tokenizer/tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerNotFoundError, match=r"tokenizer\.json is no tokenizer"):
        cut_words(broken, "prompt", "red")


def test_neither_torch_nor_transformers_is_loaded() -> None:
    program = (
        "import sys; from configs.model_preset import find_model;"
        "from configs.prompt_length import cut_words;"
        f"cut_words(find_model({BUNDLED_MODEL!r}), 'prompt', 'red');"
        "print({'torch', 'transformers', 'diffusers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
