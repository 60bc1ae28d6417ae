"""Loading a Diffusers pipeline, running one job on it, writing and probing the MP4.

Knows: one model and one job. Does not know: queues, clients, HTTP. Importing it does not import torch; that
happens when a name is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelines.loading import LoadedPipeline, load_pipeline
    from pipelines.mp4 import probe_mp4, read_manifest
    from pipelines.running import run_job
    from pipelines.text import encode_ahead
    from pipelines.warming import warm_up

_HOME = {
    "LoadedPipeline": "pipelines.loading",
    "encode_ahead": "pipelines.text",
    "load_pipeline": "pipelines.loading",
    "probe_mp4": "pipelines.mp4",
    "read_manifest": "pipelines.mp4",
    "run_job": "pipelines.running",
    "warm_up": "pipelines.warming",
}
__all__ = [
    "LoadedPipeline",
    "encode_ahead",
    "load_pipeline",
    "probe_mp4",
    "read_manifest",
    "run_job",
    "warm_up",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
