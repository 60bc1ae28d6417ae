"""Checks a Diffusers folder before anything is loaded from it.

Knows: files, JSON and safetensors headers. Does not know: torch modules or devices. Diffusers reports broken
folders in many ways, some of them by silence; here each one is a sentence that names the file.
"""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from pipelines.families import Family


class FolderError(ValueError):
    """A folder that is not a whole pipeline of the family; the message names the file and what is wrong."""


def check_folder(folder: Path, family: Family) -> dict[str, str]:
    """Return the class name of each component that the folder has, after checking all its files."""
    classes = _component_classes(folder, family)
    for name in classes:
        _check_json_files(folder / name)
    for network in family.networks:
        if network.name not in classes:
            continue
        if classes[network.name] != network.class_name:
            raise FolderError(
                f"{folder / 'model_index.json'}: {network.name} is a {classes[network.name]}, "
                f"family {family.name} needs {network.class_name}"
            )
        _check_weights(folder / network.name)
    return classes


def _component_classes(folder: Path, family: Family) -> dict[str, str]:
    path = folder / "model_index.json"
    index = _read_json(path)
    if not isinstance(index, dict):
        raise FolderError(f"{path} must hold a JSON object")
    if index.get("_class_name") != family.pipeline_class:
        raise FolderError(
            f"{path}: the pipeline is a {index.get('_class_name')}, family {family.name} needs "
            f"{family.pipeline_class}"
        )
    classes: dict[str, str] = {}
    for name, entry in index.items():
        match entry:
            case [str(), str(class_name)]:
                classes[name] = class_name
    required = ["tokenizer", "scheduler", *(network.name for network in family.networks if network.required)]
    missing = [name for name in required if name not in classes]
    if missing:
        raise FolderError(f"{path} names no {', '.join(missing)}")
    return classes


def _check_json_files(folder: Path) -> None:
    if not folder.is_dir():
        raise FolderError(f"{folder} is missing")
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise FolderError(f"{folder} has no configuration file")
    for path in paths:
        _read_json(path)


def _check_weights(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise FolderError(f"{folder / 'config.json'} is missing")
    for index in folder.glob("*.safetensors.index.json"):
        for name in _shards(index):
            if not (folder / name).is_file():
                raise FolderError(f"{folder / name} is missing; {index.name} names it")
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise FolderError(f"{folder} has no weights (*.safetensors)")
    for path in paths:
        try:
            path.open("rb").close()  # safe_open calls a file without read permission missing
            with safe_open(path, framework="np"):
                pass
        except OSError as error:
            raise FolderError(f"{path} cannot be read: {error}") from error
        except SafetensorError as error:
            raise FolderError(f"{path} is cut short or damaged: {error}") from error


def _shards(index: Path) -> list[str]:
    match _read_json(index):
        case {"weight_map": dict(weight_map)}:
            return sorted({str(name) for name in weight_map.values()})
    raise FolderError(f"{index} has no weight_map")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FolderError(f"{path} is missing") from error
    except (OSError, UnicodeDecodeError) as error:
        raise FolderError(f"{path} cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise FolderError(f"{path} is not valid JSON: {error}") from error
