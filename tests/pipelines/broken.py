"""Ways in which a Diffusers folder can be broken, each with what must be said about it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"
VAE = "vae/diffusion_pytorch_model.safetensors"
TEXT_ENCODER = "text_encoder/model.safetensors"


@dataclass(frozen=True)
class Damage:
    """A way to break a folder. ``said`` are parts of the error; every one must be in it."""

    name: str
    apply: Callable[[Path], object]
    said: tuple[str, ...]


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON object; None removes one."""
    content = json.loads(path.read_text(encoding="utf-8")) | changes
    kept = {key: value for key, value in content.items() if value is not None}
    path.write_text(json.dumps(kept), encoding="utf-8")


def edit_weights(path: Path, name: str, value: torch.Tensor | None) -> None:
    """Replace one tensor; None removes it."""
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors if value is None else tensors | {name: value}, path, metadata={"format": "pt"})


def _halved(name: str) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    return apply


def _without(part: str) -> Callable[[Path], object]:
    return lambda folder: shutil.rmtree(folder / part)


def _name_lost_shard(folder: Path) -> None:
    index = folder / "transformer/diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}))
    (folder / "transformer/part-1.safetensors").write_bytes((folder / TRANSFORMER).read_bytes())


# Found by looking at files alone.
DAMAGED_FILES = (
    Damage("no index", lambda d: (d / "model_index.json").unlink(), ("model_index.json is missing",)),
    Damage(
        "index no JSON",
        lambda d: (d / "model_index.json").write_text("{"),
        ("model_index.json is not valid JSON: Expecting property name",),
    ),
    Damage(
        "index no object",
        lambda d: (d / "model_index.json").write_text("[]"),
        ("model_index.json must hold a JSON object",),
    ),
    Damage(
        "index not text",
        lambda d: (d / "model_index.json").write_bytes(b"\xff\xfe\xff"),
        ("model_index.json cannot be read",),
    ),
    Damage(
        "another pipeline",
        lambda d: edit_json(d / "model_index.json", _class_name="LTXPipeline"),
        ("model_index.json", "the pipeline is a LTXPipeline, family wan needs WanPipeline"),
    ),
    Damage(
        "another transformer",
        lambda d: edit_json(d / "model_index.json", transformer=["diffusers", "LTXVideoTransformer3DModel"]),
        ("transformer is a LTXVideoTransformer3DModel, family wan needs WanTransformer3DModel",),
    ),
    Damage(
        "component not named",
        lambda d: edit_json(d / "model_index.json", vae=None, scheduler=None),
        ("model_index.json names no scheduler, vae",),
    ),
    *(
        Damage(f"no {part}", _without(part), (f"/{part} is missing",))
        for part in ("tokenizer", "scheduler", "text_encoder", "vae", "transformer")
    ),
    Damage(
        "empty component",
        lambda d: (d / "scheduler/scheduler_config.json").unlink(),
        ("/scheduler has no configuration file",),
    ),
    Damage(
        "no config",
        lambda d: (d / "transformer/config.json").rename(d / "transformer/other.json"),
        ("transformer/config.json is missing",),
    ),
    Damage(
        "config no JSON",
        lambda d: (d / "vae/config.json").write_text("nonsense"),
        ("vae/config.json is not valid JSON",),
    ),
    Damage(
        "tokenizer no JSON",
        _halved("tokenizer/tokenizer.json"),
        ("tokenizer/tokenizer.json is not valid JSON",),
    ),
    Damage(
        "weights not readable",
        lambda d: (d / "vae/folder.safetensors").mkdir(),
        ("vae/folder.safetensors cannot be read", "Is a directory"),
    ),
    Damage("no weights", lambda d: (d / VAE).unlink(), ("/vae has no weights (*.safetensors)",)),
    Damage(
        "lost shard", _name_lost_shard, ("transformer/part-2.safetensors is missing", "index.json names it")
    ),
    Damage(
        "shard index without map",
        lambda d: (d / "vae/diffusion_pytorch_model.safetensors.index.json").write_text("{}"),
        ("vae/diffusion_pytorch_model.safetensors.index.json has no weight_map",),
    ),
    *(
        Damage(f"halved {path}", _halved(path), (f"{path} is cut short or damaged",))
        for path in (TRANSFORMER, VAE, TEXT_ENCODER)
    ),
)

# Found only when the networks are built.
DAMAGED_CONTENT = (
    Damage(
        "lost tensor",
        lambda d: edit_weights(d / TRANSFORMER, "blocks.0.attn1.to_q.weight", None),
        ("/transformer: 1 missing weights: blocks.0.attn1.to_q.weight",),
    ),
    Damage(
        "lost tensor of the text encoder",
        lambda d: edit_weights(d / TEXT_ENCODER, "encoder.final_layer_norm.weight", None),
        ("/text_encoder: 1 missing weights: encoder.final_layer_norm.weight",),
    ),
    Damage(
        "more layers than weights",
        lambda d: edit_json(d / "transformer/config.json", num_layers=3),
        ("/transformer: ", " missing weights: blocks.2.", ", ..."),
    ),
    Damage(
        "wrong shape",
        lambda d: edit_weights(d / TRANSFORMER, "blocks.0.attn1.to_q.weight", torch.zeros(3, 3)),
        ("/transformer: ", "blocks.0.attn1.to_q.weight expected shape", "[64, 64]", "[3, 3]"),
    ),
    Damage(
        "wrong shape in the text encoder",
        lambda d: edit_weights(d / TEXT_ENCODER, "encoder.final_layer_norm.weight", torch.zeros(3)),
        ("/text_encoder: 1 mismatched weights: encoder.final_layer_norm.weight is [3] instead of [32]",),
    ),
    Damage(
        "senseless configuration",
        lambda d: edit_json(d / "vae/config.json", dim_mult="many"),
        ("/vae: ",),
    ),
    Damage(
        "unknown scheduler",
        lambda d: edit_json(d / "model_index.json", scheduler=["diffusers", "FutureScheduler"]),
        ("model_index.json: diffusers has no FutureScheduler (scheduler)",),
    ),
    Damage(
        "tokenizer of nothing",
        lambda d: (d / "tokenizer/tokenizer.json").write_text("{}"),
        ("/tokenizer: ",),
    ),
    Damage(
        "channels that do not fit",
        lambda d: _change_latent_channels(d),
        ("the transformer takes 6 latent channels and the VAE makes 4",),
    ),
)


def _change_latent_channels(folder: Path) -> None:
    edit_json(folder / "transformer/config.json", in_channels=6)
    edit_weights(folder / TRANSFORMER, "patch_embedding.weight", torch.zeros(64, 6, 1, 2, 2))
