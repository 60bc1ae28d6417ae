"""Weights that can leave the device, and blocks of a network that come one by one.

Knows: tensors, pinned host memory, streams. Does not know: which network, or why. Weights never change, so
the host keeps its copy, in pinned memory where the device can read that by itself: leaving costs nothing, and
coming back one copy.
"""

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeGuard

import torch
from torch import nn
from torch.nn import functional

from pipelines.instance_forward import replaced_forward
from pipelines.memory import release_memory

logger = logging.getLogger(__name__)
HOST = torch.device("cpu")
# A block leaves once the one after it has been computed: the host need not wait for each.
BLOCKS_BEHIND = 2


class Movable:
    """Some tensors of a network, on the device or on the host; the same numbers in both places."""

    def __init__(self, tensors: Iterable[torch.Tensor], device: torch.device) -> None:
        self._tensors = list(tensors)
        self._device = device
        self._host: list[torch.Tensor] | None = None

    def leave(self) -> None:
        """Go to the host. The first time this copies the weights there."""
        if self._host is None:
            self._host = [self._copied(tensor.data) for tensor in self._tensors]
        for tensor, data in zip(self._tensors, self._host, strict=True):
            tensor.data = data

    def enter(self) -> None:
        """Go to the device. Work that is queued after this on the current stream finds the weights there."""
        sources = self._host or [tensor.data for tensor in self._tensors]
        for tensor, data in zip(self._tensors, sources, strict=True):
            tensor.data = data.to(self._device, non_blocking=True)

    def on_host(self) -> list[torch.Tensor]:
        """Leave, to be read on the host: tensors without content stand on the device meanwhile."""
        self.leave()
        kept = [tensor.data for tensor in self._tensors]
        for tensor in self._tensors:
            tensor.data = tensor.data.new_empty(0, device=self._device)
        return kept

    def stay(self) -> None:
        """Go to the device for good: the host's copy is dropped."""
        if self._host is not None or any(tensor.device != self._device for tensor in self._tensors):
            self.enter()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # until then the host's copy is read
        self._host = None

    def _copied(self, data: torch.Tensor) -> torch.Tensor:
        data = data.to(HOST)
        if self._device.type != "cuda" or data.is_pinned():
            return data
        try:
            return data.pin_memory()
        except RuntimeError as error:  # a limit on locked memory: then copies are slower
            logger.warning("host memory is not pinned: %s", error)
            return data


class Network:
    """A network's weights: its repeated blocks, tables of embeddings, and the rest.

    ``blocks`` is empty if it has none.
    """

    def __init__(self, module: nn.Module, blocks: Sequence[nn.Module], device: torch.device) -> None:
        self.module = module
        self._device = device
        self.block_modules = list(blocks)
        self._blocks = [Movable(_tensors(block), device) for block in blocks]
        in_blocks = {tensor for block in blocks for tensor in _tensors(block)}
        self._tables = [table for table in module.modules() if _is_table(table, in_blocks)]
        # One table may have several names.
        self._rows = {table.weight: Movable([table.weight], device) for table in self._tables}
        elsewhere = in_blocks | self._rows.keys()
        self._rest = Movable([tensor for tensor in _tensors(module) if tensor not in elsewhere], device)

    def leave(self) -> None:
        """Go to the host."""
        for part in self._parts():
            part.leave()

    def enter(self) -> None:
        """Go to the device."""
        for part in self._parts():
            part.enter()

    def stay(self) -> None:
        """Go to the device, and need no room on the host."""
        for part in self._parts():
            part.stay()

    @contextlib.contextmanager
    def streamed(self) -> Iterator[None]:
        """Within the block, blocks come to the device one ahead of the computation, and leave behind it.

        Tables of embeddings stay on the host, where the rows of a text are looked up: they are large, and a
        text needs few of their rows.

        Diffusers' group offloading does not serve here: a pass that is cancelled leaves its prefetching in
        a state in which the next one goes wrong, and it has no public way to be taken off.
        """
        try:
            self._rest.enter()
            with contextlib.ExitStack() as stack:
                for table in self._tables:
                    stack.enter_context(_looked_up(table, self._rows[table.weight], self._device))
                stack.enter_context(_Stream(self.block_modules, self._blocks, self._device).watching())
                yield
        finally:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self.leave()
            # What was on the second stream is of no use to the first.
            release_memory(self._device)

    def _parts(self) -> Iterator[Movable]:
        yield self._rest
        yield from self._rows.values()
        yield from self._blocks


def _is_table(module: nn.Module, in_blocks: set[torch.Tensor]) -> TypeGuard[nn.Embedding]:
    """Whether rows are all that is done with its weights, and no block has them."""
    return type(module) is nn.Embedding and module.max_norm is None and module.weight not in in_blocks


@contextlib.contextmanager
def _looked_up(table: nn.Embedding, weights: Movable, device: torch.device) -> Iterator[None]:
    """Within the block, the table's rows are looked up on the host; the weights must leave at its end."""
    (rows,) = weights.on_host()

    def look_up(ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids.to(HOST), rows).to(device)

    with replaced_forward(table, lambda forward: look_up):
        yield


class _Stream:
    """The blocks of one network on their way, in the order in which they run."""

    def __init__(self, modules: Sequence[nn.Module], blocks: Sequence[Movable], device: torch.device) -> None:
        self._modules = modules
        self._blocks = blocks
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._here: dict[int, torch.cuda.Event | None] = {}
        self._done: deque[tuple[int, torch.cuda.Event | None]] = deque()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Within the block, calls of the modules make their weights come and go."""
        handles = []
        for index, module in enumerate(self._modules):
            handles.append(module.register_forward_pre_hook(self._before(index)))
            handles.append(module.register_forward_hook(self._after(index)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, *args: object) -> None:
            while len(self._done) >= BLOCKS_BEHIND:
                self._drop(*self._done.popleft())
            self._fetch(index)
            ready = self._here[index]
            if ready is not None:
                torch.cuda.current_stream().wait_event(ready)
            self._fetch((index + 1) % len(self._blocks))

        return hook

    def _after(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, *args: object) -> None:
            done = torch.cuda.current_stream().record_event() if self._side is not None else None
            self._done.append((index, done))

        return hook

    def _fetch(self, index: int) -> None:
        """Have the block come, unless it is here or on its way."""
        if index in self._here:
            return
        if self._side is None:
            self._blocks[index].enter()
            self._here[index] = None
            return
        with torch.cuda.stream(self._side):
            self._blocks[index].enter()
            self._here[index] = self._side.record_event()

    def _drop(self, index: int, done: torch.cuda.Event | None) -> None:
        """Have the block leave once it has been computed: its memory is then free for the next one."""
        if done is not None:
            done.synchronize()
        if index not in (waiting for waiting, _ in self._done):
            self._blocks[index].leave()
            self._here.pop(index, None)


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]
