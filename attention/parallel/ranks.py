"""The ranks that share the tokens of a forward pass, and the two ways in which data moves between them.

Knows: torch.distributed. Does not know: attention, or what is moved. Both transfers move bytes and add
nothing up, so they are exact for every dtype on NCCL and on gloo, and every byte that a rank receives from
another one is counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 warns of the old name, 2.11 has no other.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(slots=True)
class Transfer:
    """Data on its way. On a GPU ``wait`` does not hold the host back, only the current stream."""

    _work: dist.Work
    _received: Tensor
    _sent: Tensor  # kept until it has left

    def wait(self) -> Tensor:
        """What arrived."""
        self._work.wait()
        return self._received


class RankGroup:
    """``size`` processes; this one is ``rank``. All must make the same transfers in the same order.

    Attributes:
        received_bytes: what this rank has received from others so far.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.received_bytes = 0

    def gather(self, x: Tensor) -> Transfer:
        """Every rank's x, all of one shape: [size, *x.shape]."""
        sent = x.contiguous()
        received = torch.empty(self.size, *x.shape, dtype=x.dtype, device=x.device)
        work = _all_gather(_bytes(received), _bytes(sent), group=self._group, async_op=True)
        self.received_bytes += sent.nbytes * (self.size - 1)
        return Transfer(work, received, sent)

    def exchange(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Transfer:
        """Rows of x to each rank: the first ``sent[0]`` to rank 0, the next ``sent[1]`` to rank 1, ...

        Of each rank come ``received[rank]`` rows, in the order of ranks: [sum(received), *x.shape[1:]].
        """
        row = x.contiguous()
        rows = torch.empty(sum(received), *x.shape[1:], dtype=x.dtype, device=x.device)
        width = x[:1].nbytes if x.shape[0] else rows[:1].nbytes
        work = dist.all_to_all_single(
            _bytes(rows),
            _bytes(row),
            [count * width for count in received],
            [count * width for count in sent],
            group=self._group,
            async_op=True,
        )
        self.received_bytes += (sum(received) - received[self.rank]) * width
        return Transfer(work, rows, row)


def _bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)
