"""Checks of a folder's files."""

import shutil
from pathlib import Path

import pytest

from pipelines.families import WAN
from pipelines.folder import FolderError, check_folder
from tests.pipelines.broken import DAMAGED_FILES, Damage
from tests.tiny_wan import write_tiny_wan


def test_a_whole_folder_passes(tiny_folder: Path) -> None:
    assert check_folder(tiny_folder, WAN) == {
        "tokenizer": "PreTrainedTokenizerFast",
        "scheduler": "UniPCMultistepScheduler",
        "text_encoder": "UMT5EncoderModel",
        "vae": "AutoencoderKLWan",
        "transformer": "WanTransformer3DModel",
    }


def test_a_second_transformer_is_checked_too(tmp_path: Path) -> None:
    folder = write_tiny_wan(tmp_path / "two", two_transformers=True)
    assert check_folder(folder, WAN)["transformer_2"] == "WanTransformer3DModel"
    shutil.rmtree(folder / "transformer_2")
    with pytest.raises(FolderError, match="transformer_2 is missing"):
        check_folder(folder, WAN)


@pytest.mark.parametrize("damage", DAMAGED_FILES, ids=lambda damage: damage.name)
def test_damage_is_named(tiny_folder: Path, tmp_path: Path, damage: Damage) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "copy")
    damage.apply(folder)
    with pytest.raises(FolderError) as caught:
        check_folder(folder, WAN)
    message = str(caught.value)
    assert str(folder) in message
    assert [part for part in damage.said if part not in message] == []
