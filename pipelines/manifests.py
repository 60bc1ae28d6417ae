"""What ran a job: model, classes, device, number formats and library versions.

Knows: a loaded pipeline and what is installed. Does not know: jobs or files.
"""

import importlib.metadata
import re
from pathlib import Path

import torch

from configs.job import RunEnvironment
from pipelines.fused.choice import runs_fused
from pipelines.loading import LoadedPipeline

PACKAGES = ("reelwright", "torch", "diffusers", "transformers", "triton")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def environment_of(loaded: LoadedPipeline) -> RunEnvironment:
    """What must be the same for a clip to be made again, besides its parameters."""
    return RunEnvironment(
        source=loaded.preset.source,
        revision=_loaded_revision(loaded),
        pipeline=type(loaded.pipe).__name__,
        scheduler=type(loaded.pipe.scheduler).__name__,
        device=_device_name(loaded.device) + (f", {loaded.parallel.size} ranks" if loaded.parallel else ""),
        dtype=_dtype_name(loaded.dtype),
        vae_dtype=_dtype_name(loaded.vae_dtype),
        compiled=loaded.blocks.are_compiled,
        fused=runs_fused(loaded.transformers),
        precision=loaded.compute.precision,
        versions=_installed_versions(),
    )


def snapshot_commit(folder: Path) -> str | None:
    """The commit of a folder in the hub's cache (``.../snapshots/<commit>``), None for any other folder."""
    is_snapshot = folder.parent.name == "snapshots" and _COMMIT.fullmatch(folder.name)
    return folder.name if is_snapshot else None


def _loaded_revision(loaded: LoadedPipeline) -> str | None:
    """A branch or tag moves, so the commit that it named when the model was loaded comes first."""
    folder = Path(loaded.pipe.config["_name_or_path"])
    return snapshot_commit(folder) or loaded.preset.revision


def _device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    return f"{device} ({torch.cuda.get_device_name(device)})"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _installed_versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # Triton is not made for every system
            continue
    return versions
