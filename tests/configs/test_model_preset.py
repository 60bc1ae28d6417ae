"""Presets: from a name, a file or a folder, and what is said of those that are broken."""

import json
from pathlib import Path
from typing import Any

import pytest

from configs.model_preset import ModelNotFoundError, find_model

FILES: dict[str, dict[str, Any]] = {
    "model_index.json": {"_class_name": "WanPipeline"},
    "transformer/config.json": {"patch_size": [1, 2, 2]},
    "vae/config.json": {"scale_factor_spatial": 16, "scale_factor_temporal": 4},
}


def write_folder(folder: Path) -> Path:
    """The three files that a preset is read from."""
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", ["model", "a model", "мodèle-2", ".hidden", "."])
def test_a_folder_of_any_name_says_its_geometry(tmp_path: Path, name: str) -> None:
    preset = find_model(str(write_folder(tmp_path / name)))
    assert (preset.geometry.side_multiple, preset.geometry.vae_temporal) == (32, 4)
    assert (preset.defaults.width % 32, preset.defaults.height % 32) == (0, 0)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe{}", None, "folder"])
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes | str | None) -> None:
    path = write_folder(tmp_path / "model") / name
    path.unlink()
    if content == "folder":
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    with pytest.raises(ModelNotFoundError, match=path.name):
        find_model(str(tmp_path / "model"))


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("model_index.json", "_class_name", ["WanPipeline"]),
        ("transformer/config.json", "patch_size", 2),
        ("transformer/config.json", "patch_size", [1, "a", 2]),
        ("transformer/config.json", "patch_size", [1, 0, 0]),
        ("transformer/config.json", "patch_size", [1, 512, 512]),
        ("vae/config.json", "scale_factor_spatial", "x"),
        ("vae/config.json", "scale_factor_temporal", 1.5),
    ],
)
def test_a_value_that_cannot_be_is_one_line(tmp_path: Path, name: str, field: str, value: Any) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / name).write_text(json.dumps(FILES[name] | {field: value}), encoding="utf-8")
    with pytest.raises(ModelNotFoundError) as caught:
        find_model(str(folder))
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "[]", "a: b", "name: x", "name: é/\nsource: x", "name: x\nsource: y\nfoo: 1"]
)
def test_a_preset_file_that_is_none_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "preset.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"preset\.yaml: ") as caught:
        find_model(str(path))
    assert "\n" not in str(caught.value)
