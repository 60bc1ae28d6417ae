"""The file that a job goes on from: latents and sampler state after a denoise step.

Knows: its format (safetensors; everything that is no tensor is JSON in its header), checksum, and which job
it belongs to. Does not know: when one is written, or how a job goes on. Reading it runs no code.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from configs.job import AttentionReport, JobParameters, RunEnvironment
from pipelines.disk import written_beside
from pipelines.failures import first_line
from pipelines.sampler import SamplerState

CHUNK_BYTES = 2**22
LATENTS = "latents"


class CheckpointError(Exception):
    """There is a file and it must not be used; the message says why."""


class Identity(BaseModel):
    """Whose latents these are. Any difference could change the clip."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    parameters: JobParameters
    environment: RunEnvironment
    weights_sha256: str


@dataclass(frozen=True)
class Checkpoint:
    """A job after ``step`` denoise steps.

    Attributes:
        latents: [1, C, T, h, w], float32.
        sampler: the scheduler's state; empty when no step is left.
        attention: what ran in these steps.
        text_warnings: what the text stage said; it is skipped when no step is left.
    """

    step: int
    latents: torch.Tensor
    sampler: SamplerState
    attention: AttentionReport
    text_warnings: tuple[str, ...]


class _Header(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    identity: Identity
    step: int
    attention: AttentionReport
    text_warnings: tuple[str, ...]
    sampler: dict[str, Any]


def write_checkpoint(
    checkpoint: Checkpoint, identity: Identity, path: Path, *, before_chunk: Callable[[], None]
) -> int:
    """Write the file and return its bytes. What ``before_chunk`` raises leaves the earlier file as it was.

    Raises:
        OSError: it cannot be written.
    """
    tensors = {LATENTS: _portable(checkpoint.latents)}
    header = _Header(
        identity=identity,
        step=checkpoint.step,
        attention=checkpoint.attention,
        text_warnings=checkpoint.text_warnings,
        sampler={
            name: _pack(value, f"sampler.{name}", tensors) for name, value in checkpoint.sampler.items()
        },
    ).model_dump_json()
    content = save(tensors, {"header": header, "sha256": _checksum(header, tensors)})
    with written_beside(path, ".safetensors") as temporary, temporary.open("wb") as file:
        for start in range(0, len(content), CHUNK_BYTES):
            before_chunk()
            file.write(content[start : start + CHUNK_BYTES])
    return len(content)


def read_checkpoint(path: Path, identity: Identity, device: torch.device) -> Checkpoint | None:
    """Read the file, with its tensors where they were; None if there is none.

    Raises:
        CheckpointError: it is damaged, or another job's.
    """
    try:
        if not path.exists():
            return None
        header, tensors = _read(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"it cannot be read ({first_line(error)})") from error
    _require_same(header.identity, identity)
    return Checkpoint(
        step=header.step,
        latents=tensors[LATENTS].to(device),
        sampler={name: _unpack(value, tensors, device) for name, value in header.sampler.items()},
        attention=header.attention,
        text_warnings=header.text_warnings,
    )


def weights_sha256(networks: list[torch.nn.Module]) -> str:
    """Digest of names, types, shapes and some values of each weight: training changes nearly every value."""
    digest = hashlib.sha256()
    for index, network in enumerate(networks):
        for name, weight in network.state_dict().items():
            digest.update(f"{index} {name} {weight.dtype} {tuple(weight.shape)}".encode())
            digest.update(_bytes(_portable(_some_values(weight))))
    return digest.hexdigest()


def _some_values(weight: torch.Tensor, count: int = 32) -> torch.Tensor:
    flat = weight.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // count)][: count + 1]


def _portable(tensor: torch.Tensor) -> torch.Tensor:
    # A copy: safetensors refuses tensors that share memory, as views of one list of timesteps do.
    return tensor.detach().to("cpu", copy=True).contiguous()


def _pack(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """The value as JSON; tensors go into ``tensors`` and leave a reference."""
    if isinstance(value, torch.Tensor):
        tensors[name] = _portable(value)
        return {"tensor": name, "on_cpu": value.device.type == "cpu"}
    if isinstance(value, list):
        return [_pack(item, f"{name}.{index}", tensors) for index, item in enumerate(value)]
    return value


def _unpack(value: Any, tensors: dict[str, torch.Tensor], device: torch.device) -> Any:
    if isinstance(value, dict):
        tensor = tensors[value["tensor"]]
        return tensor if value["on_cpu"] else tensor.to(device)
    if isinstance(value, list):
        return [_unpack(item, tensors, device) for item in value]
    return value


def _read(path: Path) -> tuple[_Header, dict[str, torch.Tensor]]:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        # Copies, so that no tensor depends on the file.
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  # no dict
    text = metadata.get("header", "")
    if metadata.get("sha256") != _checksum(text, tensors):
        raise ValueError("its checksum is wrong")
    return _parsed(text), tensors


def _parsed(text: str) -> _Header:
    try:
        return _Header.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"another version wrote it: {where}: {first['msg']}") from error


def _checksum(header: str, tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(header.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def _require_same(found: Identity, wanted: Identity) -> None:
    differences = list(_differences(found.model_dump(), wanted.model_dump(), ""))
    if differences:
        raise CheckpointError(f"it is another job's: {', '.join(differences)}")


def _differences(found: dict[str, Any], wanted: dict[str, Any], prefix: str) -> Iterator[str]:
    for name in sorted(found.keys() | wanted.keys()):
        ours, theirs = wanted.get(name), found.get(name)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            yield from _differences(theirs, ours, f"{prefix}{name}.")
        elif ours != theirs:
            yield f"{prefix}{name}"
