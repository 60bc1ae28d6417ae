"""What a model's files say of its memory: configurations, and the headers of its weights. No weight is read.

Knows: Diffusers folders of Wan models and the safetensors format. Does not know: torch, or what is done with
the numbers.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.memory import ModelMemory, NetworkBytes, sizes_of
from configs.model_preset import ModelPreset

NETWORKS = ("text_encoder", "transformer", "transformer_2", "vae")
# Under which names the repeated blocks of a network lie.
BLOCKS = {"text_encoder": "encoder.block", "transformer": "blocks", "transformer_2": "blocks", "vae": ""}
# And its table of embeddings, which files have under one of these names.
TABLES = {"text_encoder": ("shared.weight", "encoder.embed_tokens.weight")}
_HEADER_LENGTH_BYTES = 8
_LARGEST_HEADER_BYTES = 100 * 2**20  # the format's own limit
_FLOATS = ("F", "BF")
WAN_VAE = "AutoencoderKLWan"


class ModelFilesError(ValueError):
    """The files are not on this machine (yet), or cannot be read."""


def memory_of_files(
    preset: ModelPreset, dtype_bytes: int, vae_dtype_bytes: int, *, fuses_wan_vae: bool = False
) -> ModelMemory:
    """What the preset's model needs when it is loaded in number formats of so many bytes.

    ``fuses_wan_vae``: the decoder runs fused if it is Wan's.

    Raises:
        ModelFilesError: its folder is not here, or something in it cannot be read.
    """
    folder = _folder(preset)
    try:
        index = _read_json(folder / "model_index.json")
        names = [name for name in NETWORKS if (folder / name / "config.json").is_file()]
        configs = {name: _read_json(folder / name / "config.json") for name in names}
        weights = {
            name: _weights(folder / name, vae_dtype_bytes if name == "vae" else dtype_bytes) for name in names
        }
        return model_memory(
            preset,
            index,
            configs,
            weights,
            dtype_bytes,
            vae_dtype_bytes,
            decoder_is_fused=fuses_wan_vae and configs["vae"].get("_class_name") == WAN_VAE,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFilesError(f"{folder} cannot be read: {type(error).__name__}: {error}") from error


def model_memory(
    preset: ModelPreset,
    index: Mapping[str, Any],
    configs: Mapping[str, Mapping[str, Any]],
    weights: Mapping[str, Mapping[str, int]],
    dtype_bytes: int,
    vae_dtype_bytes: int,
    *,
    decoder_is_fused: bool,
) -> ModelMemory:
    """From the configurations of the pipeline and its networks, and the bytes of each weight by its name."""
    text, transformer, vae = configs["text_encoder"], configs["transformer"], configs["vae"]
    sizes: dict[str, NetworkBytes] = {
        name: sizes_of(each, BLOCKS[name], TABLES.get(name, ())) for name, each in weights.items()
    }
    return ModelMemory(
        text_encoder=sizes["text_encoder"],
        transformers=tuple(sizes[name] for name in ("transformer", "transformer_2") if name in sizes),
        vae=sizes["vae"],
        dtype_bytes=dtype_bytes,
        vae_dtype_bytes=vae_dtype_bytes,
        hidden_size=transformer["num_attention_heads"] * transformer["attention_head_dim"],
        feed_forward_size=transformer["ffn_dim"],
        head_dim=transformer["attention_head_dim"],
        has_token_timesteps=bool(index.get("expand_timesteps")),
        text_tokens=preset.max_sequence_length,
        text_hidden_size=text["d_model"],
        text_feed_forward_size=text["d_ff"],
        text_heads=text["num_heads"],
        decoder_channels=(vae.get("decoder_base_dim") or vae["base_dim"]) * vae["dim_mult"][0],
        decoder_blocks=vae["num_res_blocks"],
        decoder_patch=vae.get("patch_size") or 1,
        decoder_is_residual=bool(vae.get("is_residual")),
        decoder_is_fused=decoder_is_fused,
        geometry=preset.geometry,
    )


def _folder(preset: ModelPreset) -> Path:
    if preset.folder is not None:
        return preset.folder
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(preset.source, "model_index.json", revision=preset.revision)
    except HFValidationError as error:
        raise ModelFilesError(f"model {preset.name}: {error}") from error
    if not isinstance(found, str):
        raise ModelFilesError(f"model {preset.name}: {preset.source} is not in the hub's cache")
    return Path(found).parent


def _weights(folder: Path, dtype_bytes: int) -> dict[str, int]:
    """Bytes of each weight once it is loaded; files of other variants, which are not loaded, left out."""
    files = [path for path in sorted(folder.glob("*.safetensors")) if path.name.count(".") == 1]
    if not files:
        raise ModelFilesError(f"{folder} holds no weights")
    return {name: size for path in files for name, size in _header(path, dtype_bytes).items()}


def _header(path: Path, dtype_bytes: int) -> dict[str, int]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_HEADER_LENGTH_BYTES), "little")
        if length > _LARGEST_HEADER_BYTES:
            raise ModelFilesError(f"{path} is no safetensors file")
        header = json.loads(file.read(length))
    return {
        name: math.prod(entry["shape"]) * dtype_bytes
        if entry["dtype"].startswith(_FLOATS)
        else entry["data_offsets"][1] - entry["data_offsets"][0]
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _read_json(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ModelFilesError(f"{path} must hold a JSON object")
    return content
