"""Where a pipeline's networks are: on the device, or on the host until they are used.

Knows: the offload levels. Does not know: jobs, how a level is chosen (pipelines/fitting.py), or how weights
move (pipelines/weights.py). Diffusers' hooks for whole models are not used: they take a network away when
another one is called, and here another thread encodes the next job's text while a job denoises.
"""

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from configs.memory import OffloadLevel
from pipelines.weights import Network

TEXT_ENCODER = "text_encoder"
VAE = "vae"


class NoRoomError(Exception):
    """A text cannot be encoded beside what is on the device now."""


class Placement:
    """The networks of one pipeline, by name. Each is where the level says, unless it is in use.

    Levels: ``none`` (everything on the device), ``encoder`` (the text encoder comes when it encodes, block by
    block, which moves no more than all of it at once), ``model`` (each network comes for its stage),
    ``group`` (blocks of transformers come one by one too).
    """

    def __init__(self, networks: Mapping[str, Network], device: torch.device) -> None:
        """Where the networks are is not changed before ``set_level``."""
        self._networks = networks
        self._device = device
        self._level: OffloadLevel = "none"
        self._text = threading.RLock()
        self._may_encode_ahead = True

    @classmethod
    def of(
        cls, networks: Mapping[str, nn.Module], blocks: Mapping[str, str], device: torch.device
    ) -> "Placement":
        """From modules by name, and the path of each one's repeated blocks; empty: it has none."""
        return cls(
            {name: Network(module, _at(module, blocks[name]), device) for name, module in networks.items()},
            device,
        )

    def blocks(self, name: str) -> Sequence[nn.Module]:
        """The repeated blocks of a network."""
        return self._networks[name].block_modules

    @property
    def level(self) -> OffloadLevel:
        """The level in force."""
        return self._level

    def set_level(self, level: OffloadLevel, *, may_encode_ahead: bool = True) -> None:
        """Put every network where it is while it is not used. Only between two stages of a job.

        ``may_encode_ahead``: whether there is room for the text encoder beside the transformers.
        """
        with self._text:
            self._level = level
            self._may_encode_ahead = may_encode_ahead
            # Those that leave make room for those that come.
            for name in sorted(self._networks, key=self._leaves, reverse=True):
                self._go_home(name)

    def stop_encoding_ahead(self) -> None:
        """Have no text encoded beside the next stage, unless all networks are on the device anyway."""
        with self._text:
            self._may_encode_ahead = self._level == "none"

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Within the block, no other thread moves weights: they can be read where they are."""
        with self._text:
            yield

    @contextlib.contextmanager
    def encoding(self, *, ahead: bool = False) -> Iterator[None]:
        """Within the block, the text encoder can run. From any thread.

        Raises:
            NoRoomError: ``ahead`` of its own job, a text may not be encoded now.
        """
        with self._text:
            if ahead and not self._may_encode_ahead:
                raise NoRoomError
            with self._usable([TEXT_ENCODER]):
                yield

    @contextlib.contextmanager
    def denoising(self) -> Iterator[None]:
        """Within the block, the transformers can run; from level ``model`` on only one is there at a time."""
        names = [name for name in self._networks if name not in (TEXT_ENCODER, VAE)]
        if self._level == "model" and len(names) > 1:
            with self._one_at_a_time(names):
                yield
        else:
            with self._usable(names):
                yield

    @contextlib.contextmanager
    def decoding(self, device: torch.device) -> Iterator[None]:
        """Within the block, the VAE is on that device: the pipeline's, or the host."""
        vae = self._networks[VAE]
        try:
            if device == self._device:
                vae.enter()
            else:
                vae.leave()
            yield
        finally:
            self._go_home(VAE)

    def _leaves(self, name: str) -> bool:
        """Whether the network is on the host while it is not used."""
        return self._level in ("model", "group") or (self._level == "encoder" and name == TEXT_ENCODER)

    def _go_home(self, name: str) -> None:
        if self._leaves(name):
            self._networks[name].leave()
        else:
            self._networks[name].stay()

    @contextlib.contextmanager
    def _usable(self, names: Sequence[str]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name in filter(self._leaves, names):
                network = self._networks[name]
                if self._level == "group" or name == TEXT_ENCODER:
                    stack.enter_context(network.streamed())
                else:
                    stack.callback(network.leave)
                    network.enter()
            yield

    @contextlib.contextmanager
    def _one_at_a_time(self, names: Sequence[str]) -> Iterator[None]:
        """Within the block, a transformer that is called comes, and the others leave."""
        here = ""

        def bring(name: str) -> None:
            nonlocal here
            if name == here:
                return
            for other in names:
                self._networks[other].leave()
            self._networks[name].enter()
            here = name

        by_module: dict[nn.Module, str] = {self._networks[name].module: name for name in names}

        def before_call(module: nn.Module, args: object) -> None:
            bring(by_module[module])

        handles = [module.register_forward_pre_hook(before_call) for module in by_module]
        try:
            bring(names[0])  # the pipeline asks it for its device before the first call
            yield
        finally:
            for handle in handles:
                handle.remove()
            for name in names:
                self._networks[name].leave()


def _at(module: nn.Module, path: str) -> list[nn.Module]:
    return list(module.get_submodule(path).children()) if path else []
