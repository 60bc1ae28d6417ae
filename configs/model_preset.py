"""Model presets: where a model lies, what it can make, and its careful defaults. One YAML file each."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from configs.attention import AttentionConfig
from configs.compute import StepCache
from configs.geometry import VideoGeometry

PRESET_FOLDER = Path(__file__).parent / "models"
BUNDLED_MODEL = "reelwright-shapes"
Positive = Annotated[int, Field(ge=1)]


class GenerationDefaults(BaseModel):
    """What a request gets when it does not say."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    width: Positive = 832
    height: Positive = 480
    num_frames: Positive = 81
    fps: Positive = 16
    num_inference_steps: Positive = 50
    guidance_scale: Annotated[float, Field(ge=0)] = 5.0
    negative_prompt: str = ""
    step_cache: StepCache = "off"


class GenerationLimits(BaseModel):
    """Largest values that a request may ask for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    min_side: Positive = 64
    max_side: Positive = 1920
    max_num_frames: Positive = 241
    max_num_inference_steps: Positive = 200
    max_guidance_scale: Annotated[float, Field(gt=0)] = 30.0


class ModelPreset(BaseModel):
    """One loadable model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    family: Literal["wan"] = "wan"
    source: str = Field(description="Diffusers folder (relative ones: to the repository) or hub id.")
    revision: str | None = None
    description: str = ""
    geometry: VideoGeometry = VideoGeometry()
    num_layers: Positive | None = Field(default=None, description="Blocks of the transformer, if known.")
    max_sequence_length: Positive = Field(
        default=512,
        description="Text tokens the transformer sees; longer prompts are cut with a warning.",
    )
    defaults: GenerationDefaults = GenerationDefaults()
    limits: GenerationLimits = GenerationLimits()
    attention: AttentionConfig = AttentionConfig()

    @property
    def folder(self) -> Path | None:
        """The local folder that ``source`` names, or None for a hub id."""
        for path in (Path(self.source).expanduser(), PRESET_FOLDER.parent.parent / self.source):
            if (path / "model_index.json").is_file():
                return path.resolve()
        return None


class ModelNotFoundError(ValueError):
    """No preset, folder or hub id of that name; the message lists what there is."""


def preset_names() -> list[str]:
    """Names of the presets that ship with the package."""
    return sorted(path.stem for path in PRESET_FOLDER.glob("*.yaml"))


def read_preset(path: Path) -> ModelPreset:
    """Read one preset file. Raises ValueError naming the file and the field at fault."""
    try:
        return ModelPreset.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        raise ValueError(f"model preset {path}: {_first_fault(error)}") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"model preset {path}: {error}") from error


def find_model(model: str) -> ModelPreset:
    """Resolve a preset name, a preset file, a Diffusers folder or a hub id to a preset.

    A folder or hub id that a shipped preset names as its source gets that preset's defaults. Another one gets
    the family's defaults with its geometry read from its own config files.
    """
    if model in preset_names():
        return read_preset(PRESET_FOLDER / f"{model}.yaml")
    try:
        path = Path(model).expanduser()
    except RuntimeError as error:
        raise ModelNotFoundError(f"model {model!r}: there is no such user") from error
    if path.suffix in {".yaml", ".yml"} and path.is_file():
        return read_preset(path)
    for name in preset_names():
        preset = read_preset(PRESET_FOLDER / f"{name}.yaml")
        if preset.source == model:
            return preset
    if path.is_dir():
        return _preset_of_folder(path)
    if model.count("/") == 1 and not model.startswith((".", "/", "~")):
        return _preset_of_hub_id(model)
    raise ModelNotFoundError(
        f"model {model!r} is no preset ({', '.join(preset_names())}), no folder and no hub id (owner/name)"
    )


def _preset_of_folder(folder: Path) -> ModelPreset:
    if not (folder / "model_index.json").is_file():
        raise ModelNotFoundError(f"model folder {folder} has no model_index.json: not in Diffusers format")
    return _preset_from_configs(
        folder.name,
        str(folder),
        _read_json(folder / "model_index.json"),
        _read_json(folder / "transformer/config.json"),
        _read_json(folder / "vae/config.json"),
    )


def _preset_of_hub_id(hub_id: str) -> ModelPreset:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    def fetch(name: str) -> dict[str, Any]:
        try:
            return _read_json(Path(hf_hub_download(hub_id, name)))
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            raise ModelNotFoundError(
                f"model {hub_id!r}: cannot fetch {name} from the hub: {error}"
            ) from error

    return _preset_from_configs(
        hub_id.split("/")[1],
        hub_id,
        fetch("model_index.json"),
        fetch("transformer/config.json"),
        fetch("vae/config.json"),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelNotFoundError(f"{path} is missing: not a whole Diffusers folder") from error
    except json.JSONDecodeError as error:
        raise ModelNotFoundError(f"{path} is not valid JSON: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ModelNotFoundError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelNotFoundError(f"{path} must hold a JSON object")
    return content


def _preset_from_configs(
    name: str, source: str, index: dict[str, Any], transformer: dict[str, Any], vae: dict[str, Any]
) -> ModelPreset:
    pipeline_class = index.get("_class_name")
    if pipeline_class != "WanPipeline":
        raise ModelNotFoundError(
            f"model {source!r} is a {pipeline_class!r}; this version serves WanPipeline (text to video)"
        )
    said = {
        "vae_spatial": vae.get("scale_factor_spatial"),
        "vae_temporal": vae.get("scale_factor_temporal"),
        "patch": transformer.get("patch_size"),
    }
    safe_name = (
        "".join(c if (c.isascii() and c.isalnum()) or c in "._-" else "-" for c in name).lstrip("._-")
        or "model"
    )
    try:
        geometry = VideoGeometry.model_validate({k: v for k, v in said.items() if v is not None})
        step = geometry.side_multiple
        defaults = GenerationDefaults(width=832 // step * step, height=480 // step * step)
        return ModelPreset(
            name=safe_name,
            source=source,
            geometry=geometry,
            num_layers=transformer.get("num_layers"),
            defaults=defaults,
        )
    except ValidationError as error:
        raise ModelNotFoundError(f"model {source!r} cannot be served: {_first_fault(error)}") from error


def _first_fault(error: ValidationError) -> str:
    entry = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in entry["loc"])
    return f"{where or 'all of it'}: {entry['msg']}, got {entry['input']!r:.80}"
