"""Loads a Diffusers pipeline from a folder or the hub, checked part by part.

Knows: presets, families, folders. Does not know: jobs. Whatever is wrong with a model becomes one
JobFailedError("model_load_failed") that names the folder and the fault.
"""

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers
import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from configs.compute import AUTO, EAGER, ComputeSettings
from configs.job import JobFailedError
from configs.memory import NO_MEMORY_OPTIONS, MemoryOptions, ModelMemory
from configs.model_files import BLOCKS, model_memory
from configs.model_preset import ModelPreset
from pipelines.colour_learning import ColourLearner
from pipelines.compiling import RepeatedBlocks
from pipelines.families import FAMILIES, Family, Network, Pipeline
from pipelines.fitting import OffloadError, place_weights
from pipelines.folder import FolderError, check_folder
from pipelines.fp8 import Fp8Error, require_fp8, to_fp8
from pipelines.fused.choice import FusedError, fuse, fuse_vae
from pipelines.fused.wan_vae import runs_fused
from pipelines.joined_attention import join_projections
from pipelines.placement import Placement
from pipelines.precision import Precision, PrecisionError, choose_precision
from pipelines.text_cache import TextCache

if TYPE_CHECKING:
    from pipelines.parallel import ParallelGroup
    from pipelines.ranks import Ranks

LIBRARIES = {"diffusers": diffusers, "transformers": transformers}
# Both fail on weights of a wrong shape; told to ignore them, transformers says which they are.
LOAD_OPTIONS = {"diffusers": {}, "transformers": {"ignore_mismatched_sizes": True}}
# Two from_pretrained calls at once leave half-initialised modules behind in both libraries.
LOAD_LOCK = threading.Lock()


@dataclass(frozen=True)
class LoadedPipeline:
    """A pipeline ready for jobs, one at a time. ``pipe`` is the Diffusers object; only jobs may call it."""

    pipe: Pipeline
    family: Family
    preset: ModelPreset
    device: torch.device
    dtype: torch.dtype
    vae_dtype: torch.dtype
    load_seconds: float
    busy: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    """Held while a job runs: a pipeline keeps state, and two jobs at once would spoil both clips."""
    parallel: "ParallelGroup | None" = field(default=None, repr=False, compare=False)
    """The ranks that denoise together, of which this process is one; None: it does so alone."""
    ranks: "Ranks | None" = field(default=None, repr=False, compare=False)
    """On rank 0 of several: the others' processes."""
    memory_options: MemoryOptions = NO_MEMORY_OPTIONS
    compute: ComputeSettings = EAGER
    blocks: RepeatedBlocks = field(default_factory=RepeatedBlocks.eager, repr=False, compare=False)
    """Of the transformers, compiled or not."""
    texts: TextCache = field(default_factory=TextCache, repr=False, compare=False)
    colours: ColourLearner = field(default_factory=ColourLearner, repr=False, compare=False)
    """What the jobs of this process have shown of a VAE that no table is for; previews need it."""

    @cached_property
    def placement(self) -> Placement:
        """Where the networks are. Made once, when the weights are those that jobs run with."""
        return Placement.of(self.networks, BLOCKS, self.device)

    @cached_property
    def memory(self) -> ModelMemory:
        """What decides how much memory a job needs; made as ``placement`` is."""
        weights = {
            name: {
                key: tensor.nbytes for key, tensor in (*module.named_parameters(), *module.named_buffers())
            }
            for name, module in self.networks.items()
        }
        configs = {name: _config(module) for name, module in self.networks.items()}
        return model_memory(
            self.preset,
            self.pipe.config,
            configs,
            weights,
            self.dtype.itemsize,
            self.vae_dtype.itemsize,
            decoder_is_fused=self.decodes_fused,
        )

    @property
    def decodes_fused(self) -> bool:
        """Whether the VAE's decoder is fused."""
        return runs_fused(self.pipe.vae)

    @property
    def transformers(self) -> list[Any]:
        """The one, or the two, that denoise."""
        return [module for name, module in self.networks.items() if name.startswith("transformer")]

    @property
    def networks(self) -> dict[str, Any]:
        """The networks that the pipeline has, by name."""
        found = {name: getattr(self.pipe, name) for name in self.family.network_names}
        return {name: module for name, module in found.items() if module is not None}


def load_pipeline(
    preset: ModelPreset,
    *,
    device: str = "auto",
    dtype: str = "auto",
    memory: MemoryOptions = NO_MEMORY_OPTIONS,
    compute: ComputeSettings = AUTO,
) -> LoadedPipeline:
    """Load the preset's model, check it, and put on the device what fits there beside the work.

    ``device``: ``auto`` (CUDA where there is one), ``cpu``, ``cuda`` or ``cuda:<index>``. ``dtype``: ``auto``
    (bfloat16 on CUDA; on a CPU whatever a short measurement finds faster), ``float32`` or ``bfloat16``; the
    VAE's is one of ``compute``.
    Blocks that are to be compiled are so in the first pass.

    Raises:
        JobFailedError: ``model_load_failed``, naming the folder and what is wrong with it.
    """
    family = FAMILIES[preset.family]
    start = time.perf_counter()
    with _as_load_failure(preset), LOAD_LOCK, _no_progress_bars():
        precision = choose_precision(device, dtype, compute.vae_dtype)
        folder = _folder(preset, family)
        pipe = _load(folder, family, precision)
        loaded = made_ready(pipe, preset, precision, memory, compute)
    # A copy would have another placement; no one else has seen this one yet.
    object.__setattr__(loaded, "load_seconds", time.perf_counter() - start)
    return loaded


def made_ready(
    pipe: Pipeline, preset: ModelPreset, precision: Precision, memory: MemoryOptions, compute: ComputeSettings
) -> LoadedPipeline:
    """What loading does with a pipeline that has its weights, wherever they are and came from.

    Raises:
        FolderError: it does not fit the preset. Fp8Error, OffloadError: the device lacks what was asked for.
        FusedError: the model does.
    """
    family = FAMILIES[preset.family]
    _check_fit(pipe, family, preset)
    if precision.device.type == "cpu":
        _channels_last(pipe.vae)
    names = [name for name in family.network_names if name.startswith("transformer")]
    denoisers = [each for name in names if (each := getattr(pipe, name)) is not None]
    if precision.device.type == "cuda":  # a CPU's matrix products gain nothing
        for transformer in denoisers:
            join_projections(transformer)
    blocks = family.blocks(pipe)
    if compute.precision == "fp8":
        require_fp8(precision.device, precision.network)
        to_fp8(blocks)
    fuse(denoisers, precision.device, precision.network, compute.fused)
    fuse_vae(pipe.vae, precision.device, compute.fused)
    loaded = LoadedPipeline(
        pipe=pipe,
        family=family,
        preset=preset,
        device=precision.device,
        dtype=precision.network,
        vae_dtype=precision.vae,
        load_seconds=0.0,
        memory_options=memory,
        compute=compute,
        blocks=RepeatedBlocks(blocks, precision.device, compute.compile),
    )
    place_weights(loaded)
    return loaded


def _config(network: Any) -> dict[str, Any]:
    config = network.config
    return dict(config) if isinstance(config, Mapping) else dict(config.to_dict())


@contextlib.contextmanager
def _as_load_failure(preset: ModelPreset) -> Iterator[None]:
    # The libraries below raise nearly anything for a broken folder, so this border takes every Exception.
    try:
        yield
    except Exception as error:
        known = isinstance(error, FolderError | PrecisionError | OffloadError | Fp8Error | FusedError)
        reason = str(error) if known else f"{type(error).__name__}: {error}"
        where = preset.folder or preset.source
        raise JobFailedError(
            "model_load_failed", f"model {preset.name} ({where}) cannot be loaded: {reason}"
        ) from error


def _folder(preset: ModelPreset, family: Family) -> Path:
    if preset.folder is not None:
        return preset.folder
    if Path(preset.source).expanduser().is_dir() or preset.source.count("/") != 1:
        raise FolderError("there is no Diffusers folder (with a model_index.json)")
    parts = ("tokenizer", "scheduler", *family.network_names)
    try:
        return Path(
            snapshot_download(
                preset.source,
                revision=preset.revision,
                allow_patterns=["model_index.json", *(f"{part}/*" for part in parts)],
                ignore_patterns=["*.bin", "*.fp16.*", "*.bf16.*"],
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        revision = f" at revision {preset.revision}" if preset.revision else ""
        raise FolderError(f"the hub gives no {preset.source}{revision}: {error}") from error


def _load(folder: Path, family: Family, precision: Precision) -> Pipeline:
    classes = check_folder(folder, family)
    tokenizer = _load_part(folder, "tokenizer", transformers, classes)
    if not tokenizer.is_fast:
        raise FolderError(f"{folder / 'tokenizer'} has no tokenizer.json (a fast tokenizer)")
    parts = {
        network.name: _load_network(folder, network, precision)
        for network in family.networks
        if network.name in classes
    }
    pipe = getattr(diffusers, family.pipeline_class).from_pretrained(
        folder,
        tokenizer=tokenizer,
        scheduler=_load_part(folder, "scheduler", diffusers, classes),
        **parts,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _channels_last(vae: torch.nn.Module) -> None:
    """The layout that a CPU convolves fastest in; it changes no shape and no value."""
    for module in vae.modules():
        if isinstance(module, torch.nn.Conv3d):
            module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last_3d)


def _load_part(folder: Path, name: str, library: Any, classes: dict[str, str]) -> Any:
    part_class = getattr(library, classes[name], None)
    if part_class is None:
        raise FolderError(
            f"{folder / 'model_index.json'}: {library.__name__} has no {classes[name]} ({name})"
        )
    try:
        return part_class.from_pretrained(folder / name)
    except Exception as error:
        raise FolderError(f"{folder / name}: {type(error).__name__}: {error}") from error


def _load_network(folder: Path, network: Network, precision: Precision) -> torch.nn.Module:
    network_class = getattr(LIBRARIES[network.library], network.class_name)
    try:
        module, info = network_class.from_pretrained(
            folder / network.name,
            dtype=precision.vae if network.name == "vae" else precision.network,
            use_safetensors=True,
            output_loading_info=True,
            **LOAD_OPTIONS[network.library],
        )
    except Exception as error:
        raise FolderError(f"{folder / network.name}: {type(error).__name__}: {error}") from error
    # Both libraries fill such weights with random numbers and only log it.
    for fault in ("mismatched", "missing"):
        names = sorted(_describe(key) for key in info[f"{fault}_keys"])
        if names:
            some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            raise FolderError(f"{folder / network.name}: {len(names)} {fault} weights: {some}")
    result: torch.nn.Module = module.eval()
    return result


def _describe(key: str | tuple[str, torch.Size, torch.Size]) -> str:
    if isinstance(key, str):
        return key
    name, found, expected = key
    return f"{name} is {list(found)} instead of {list(expected)}"


def _check_fit(pipe: Pipeline, family: Family, preset: ModelPreset) -> None:
    for source, geometry in family.geometries(pipe).items():
        if geometry != preset.geometry:
            raise FolderError(f"{source} has {geometry!r}, the preset says {preset.geometry!r}")
    reason = family.mismatch(pipe)
    if reason is not None:
        raise FolderError(reason)


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Keep both libraries from drawing bars; callers show progress in their own way."""
    logs = (diffusers.utils.logging, transformers.utils.logging)
    enabled = [log for log in logs if log.is_progress_bar_enabled()]
    for log in enabled:
        log.disable_progress_bar()
    try:
        yield
    finally:
        for log in enabled:
            log.enable_progress_bar()
