"""The processes that denoise one clip together, as each of them sees the others.

Knows: torch.distributed: who shares the tokens of a pass, who computes which pass of guidance, and how all
stop at the same step. Does not know: models, or who starts the processes.
"""

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from attention import RankGroup
from configs.job import JobCancelledError, JobParameters
from pipelines.text import uses_guidance

Guidance = Literal["split", "together"]
_GO_ON, _CANCELLED, _FAILED = range(3)


class OtherRankFailedError(RuntimeError):
    """This rank is well, and another one has left the denoise with an error that it reports itself."""


class ParallelGroup:
    """This process among ``size`` ranks. All use it alike and in the same order.

    With guidance and an even number of ranks, each step's two passes run at once: the first half of the ranks
    shares the tokens of the pass with the prompt, the other half those of the other pass, and once a step
    each rank swaps its result with its partner in the other half. Every layer then moves less than half of
    the bytes that all ranks would move for both passes, so it is always done.

    Attributes:
        everyone: all ranks, to share the tokens of a pass.
        has_stopped_together: whether the last ``agreed`` ended in a cancel or an error, on all ranks.
    """

    def __init__(
        self, rank: int, size: int, meeting: str, device: torch.device, timeout_seconds: float
    ) -> None:
        """Meet the others at the path ``meeting``, which is new. Only one such group can be in a process."""
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # all are on this host
            os.environ.setdefault(name, "lo")
        timeout = timedelta(seconds=timeout_seconds)
        on_gpu = device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=device if on_gpu else None,
        )
        self.rank = rank
        self.size = size
        self.has_stopped_together = False
        self._control = dist.new_group(backend="gloo", timeout=timeout)
        self.everyone = RankGroup(_required(dist.group.WORLD))
        self._half = self._pair = None
        if size % 2 == 0:
            half = size // 2
            halves = [list(range(half)), list(range(half, size))]
            self._half = _own_of(halves, rank, timeout)
            self._pair = _own_of([[first, first + half] for first in range(half)], rank, timeout)

    def guidance(self, params: JobParameters) -> Guidance | None:
        """How a job's two passes a step are computed; None: there is only one."""
        if not uses_guidance(params):
            return None
        return "together" if self._half is None else "split"

    def token_ranks(self, params: JobParameters) -> RankGroup | None:
        """The ranks that share the tokens of this rank's passes; None: it has all tokens."""
        ranks = self._half if self.guidance(params) == "split" else self.everyone
        return None if ranks is None or ranks.size == 1 else ranks

    def partners(self, params: JobParameters) -> RankGroup | None:
        """The two ranks that swap results; rank 0 of them computes the pass with the prompt."""
        return self._pair if self.guidance(params) == "split" else None

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """A border at which all ranks go on, or none: one that raises within the block stops all.

        Raises:
            JobCancelledError: a rank raised it.
            OtherRankFailedError: another rank raised something else.
        """
        status = _GO_ON
        own: Exception | None = None
        try:
            yield
        except JobCancelledError as error:
            status, own = _CANCELLED, error
        except Exception as error:
            status, own = _FAILED, error
        found = torch.tensor([status])
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._control)
        worst = int(found)
        self.has_stopped_together = worst != _GO_ON
        if worst == _FAILED:
            raise own if status == _FAILED and own else OtherRankFailedError("another rank failed")
        if worst == _CANCELLED:
            raise own or JobCancelledError

    def close(self) -> None:
        """Leave the others."""
        dist.destroy_process_group()


def _required(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is None:
        raise RuntimeError("torch.distributed has no group of all ranks")
    return group


def _own_of(groups: list[list[int]], rank: int, timeout: timedelta) -> RankGroup:
    """Every rank makes all groups; the one that this rank is in."""
    made = {tuple(members): dist.new_group(members, timeout=timeout) for members in groups}
    return RankGroup(next(group for members, group in made.items() if rank in members))
