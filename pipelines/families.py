"""The model families that can be served, one typed spec each.

Knows: which Diffusers classes a family is made of and where its parts lie. Does not know: presets, jobs, or
how anything is loaded. A new family is a new module like ``wan`` and an entry in ``FAMILIES``.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from configs.geometry import VideoGeometry
from pipelines import wan
from pipelines.tile import Tile

Library = Literal["diffusers", "transformers"]
# A loaded Diffusers pipeline; Diffusers publishes no types.
Pipeline = Any


@dataclass(frozen=True)
class Network:
    """A component with weights: its folder, and the class that its folder must be of."""

    name: str
    library: Library
    class_name: str
    required: bool = True


@dataclass(frozen=True)
class Family:
    """What loading and running need to know about one kind of pipeline."""

    name: str
    pipeline_class: str
    networks: tuple[Network, ...]
    repeated_blocks: tuple[str, ...]
    """The blocks that make up a transformer, all of one class; named as ``cancel_points`` are."""
    cancel_points: tuple[str, ...]
    """Modules before whose every call a job may stop; ``*`` stands for all children."""
    geometries: Callable[[Pipeline], dict[str, VideoGeometry]]
    """What the loaded pipeline says of its compression and patches, by source; all must agree."""
    mismatch: Callable[[Pipeline], str | None]
    """Why the components do not fit each other, or None."""
    clean_prompt: Callable[[str], str]
    """The text that the tokenizer will see."""
    encode_texts: Callable[[Pipeline, Sequence[str], int], torch.Tensor]
    """(pipe, texts, tokens of each) -> [texts, tokens, text_dim], from one pass of the text encoder."""
    decode_latents: Callable[[Pipeline, torch.Tensor], torch.Tensor]
    """Latents [1, C, T, h, w] -> pictures [F, 3, H, W] in 0 to 1, in the VAE's dtype."""
    decoded_parts: Callable[[Pipeline, torch.Tensor], Iterator[torch.Tensor]]
    """The same in parts [f, 3, H, W], so that frames leave the device as they are decoded."""
    tiled: Callable[[Pipeline, Tile | None], AbstractContextManager[None]]
    """Within the block, pictures are decoded in tiles of that size, or as a whole."""
    forget: Callable[[Pipeline], None]
    """Drop what an interrupted job left inside the components."""

    def cancel_modules(self, pipe: Pipeline) -> list[torch.nn.Module]:
        """The modules that ``cancel_points`` names, where the pipeline has them."""
        return _modules(pipe, self.cancel_points)

    def blocks(self, pipe: Pipeline) -> list[torch.nn.Module]:
        """The repeated blocks of all transformers."""
        return _modules(pipe, self.repeated_blocks)

    def last_blocks(self, pipe: Pipeline) -> list[torch.nn.Module]:
        """The last block of each transformer."""
        blocks = (_modules(pipe, (point,)) for point in self.repeated_blocks)
        return [found[-1] for found in blocks if found]

    @property
    def network_names(self) -> tuple[str, ...]:
        """Folders that hold weights."""
        return tuple(network.name for network in self.networks)


def _modules(pipe: Pipeline, points: tuple[str, ...]) -> list[torch.nn.Module]:
    modules: list[torch.nn.Module] = []
    for point in points:
        component, _, path = point.partition(".")
        if getattr(pipe, component) is None:
            continue
        module = getattr(pipe, component).get_submodule(path.removesuffix(".*"))
        modules.extend(module.children() if path.endswith(".*") else [module])
    return modules


WAN = Family(
    name="wan",
    pipeline_class="WanPipeline",
    networks=(
        Network("text_encoder", "transformers", "UMT5EncoderModel"),
        Network("vae", "diffusers", "AutoencoderKLWan"),
        Network("transformer", "diffusers", "WanTransformer3DModel"),
        # Wan 2.2 A14B: a second transformer for the low-noise steps.
        Network("transformer_2", "diffusers", "WanTransformer3DModel", required=False),
    ),
    repeated_blocks=("transformer.blocks.*", "transformer_2.blocks.*"),
    cancel_points=(
        "text_encoder.encoder.block.*",
        "transformer.blocks.*",
        "transformer_2.blocks.*",
        "vae.decoder",
    ),
    geometries=wan.geometries,
    mismatch=wan.mismatch,
    clean_prompt=wan.clean_prompt,
    encode_texts=wan.encode_texts,
    decode_latents=wan.decode_latents,
    decoded_parts=wan.decoded_parts,
    tiled=wan.tiled,
    forget=wan.forget,
)

FAMILIES: dict[str, Family] = {family.name: family for family in (WAN,)}
