"""Counts the bytes of tensors that live at once, on any device; on ``meta`` nothing is computed.

Knows: storages, and when they end. Does not know: what an operator needs inside itself.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Within the block, ``peak`` is the most bytes of results of operators that lived at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        before = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        result: Any = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage(), before)
        return result

    def _count(self, storage: torch.UntypedStorage, before: set[int]) -> None:
        key = storage._cdata
        if key in before or key in self._known:
            return
        size = storage.nbytes()
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._end, key, size)

    def _end(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size
