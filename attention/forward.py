"""One forward pass of a swapped transformer, and the operator that its self-attention layers call.

Knows: what is sparse in this pass and what is counted. Does not know: transformers, or any operator.
"""

from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from attention.backends import MeasuredPlan, OverwritingPlan, Plan, TokenGrid, TokenOrder
from attention.dense import dense_attention, dense_implementation
from attention.parallel.shards import Shards


@dataclass(frozen=True, slots=True)
class TextTokens:
    """Text in self-attention: ``count`` tokens of each batch entry, the first ``valid`` of them text.

    The rest is padding: nothing sees it, and its own rows of attention are zero.
    """

    count: int
    valid: tuple[int, ...]


@dataclass
class Counts:
    """What ran since the swap. Pairs are of all heads; ``tallies``, by device, count some more of them."""

    tokens: int = 0
    text_tokens: int = 0
    sparse_calls: int = 0
    allowed_pairs: int = 0
    all_pairs: int = 0
    tallies: dict[torch.device, Tensor] = field(default_factory=dict)
    implementations: set[str] = field(default_factory=set)
    dense_implementations: set[str] = field(default_factory=set)
    dense_reasons: Counter[str] = field(default_factory=Counter)
    sparse_received_bytes: int = 0
    dense_received_bytes: int = 0

    def tally(self, device: torch.device) -> Tensor:
        """int64 [] on the device, which kernels add to; so that no call waits for it."""
        if device not in self.tallies:
            self.tallies[device] = torch.zeros((), dtype=torch.int64, device=device)
        return self.tallies[device]

    @property
    def density(self) -> float:
        """Allowed pairs over all pairs of the sparse calls; 1 if none was sparse. Waits for the device."""
        if not self.all_pairs:
            return 1.0
        return (self.allowed_pairs + sum(int(tally) for tally in self.tallies.values())) / self.all_pairs


@dataclass(frozen=True)
class ForwardPass:
    """What all layers of one pass share.

    Attributes:
        plan: of the sparse calls; None: every call is dense.
        dense_reason: why all are dense; None: those that may are sparse.
        text: tokens before the clip's, the padding first, then the text itself; None: there are none.
        moved: between layers, tokens lie in the order of the plan; if not, sparse calls move them.
        shards: between layers, this process has some of the tokens only; then ``moved`` is of no account.
    """

    grid: TokenGrid
    plan: Plan | None
    dense_reason: str | None
    counts: Counts
    text: TextTokens | None
    moved: bool
    shards: Shards | None = None

    def order(self, device: torch.device) -> TokenOrder | None:
        """The order of the clip's tokens between layers, None if nothing is moved."""
        if self.shards is not None:
            return self.shards.order(device)
        return self.plan.order(device) if self.plan is not None and self.moved else None

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        dense_layer: bool,
        layer: int,
        *,
        over: bool = False,
        counts: bool = True,
    ) -> Tensor:
        """One self-attention call; [batch, tokens, heads, head_dim].

        With ``over`` the result is q itself, written over, where that can be: it needs no room then. Without
        ``counts`` it is of further heads of the call before.
        """
        over = over and self.text is None
        reason = self.dense_reason or ("dense_layers" if dense_layer else None)
        if counts and reason:
            self.counts.dense_reasons[reason] += 1
        elif counts:
            self.counts.sparse_calls += 1

        def call(q: Tensor, k: Tensor, v: Tensor, text: int) -> Tensor:
            if reason or self.plan is None:
                return self._dense(q, k, v, scale, text, over)
            self._count(self.plan, q, text)
            return self._sparse(self.plan, q, k, v, scale, layer, text, over)

        before = self.shards.ranks.received_bytes if self.shards is not None else 0
        out = call(q, k, v, 0) if self.text is None else _without_padding(call, self.text, q, k, v)
        if self.shards is not None:
            self._count_received(self.shards.ranks.received_bytes - before, is_dense=bool(reason))
        return out

    def _dense(self, q: Tensor, k: Tensor, v: Tensor, scale: float, text: int, over: bool) -> Tensor:
        def attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None) -> Tensor:
            self.counts.dense_implementations.add(dense_implementation(q, k))
            return dense_attention(q, k, v, scale, out)

        if self.shards is not None:
            return self.shards.by_heads(attend, q, k, v, text)
        return attend(q, k, v, q if over else None)

    def _sparse(
        self,
        plan: Plan,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        layer: int,
        text: int,
        over: bool,
    ) -> Tensor:
        if self.shards is not None and self.shards.anchored is not None:
            return self.shards.by_anchors(q, k, v, scale, text)
        if self.shards is not None:
            return self.shards.by_heads(
                lambda q, k, v: plan.attend(q, k, v, scale, layer, text), q, k, v, text
            )
        order = None if self.moved else plan.order(q.device)
        if order is None and over and isinstance(plan, OverwritingPlan):
            plan.attend_over(q, k, v, scale, layer, text)
            return q
        if order is None:
            return self._attend(plan, q, k, v, scale, layer, text)
        first = torch.arange(text, device=q.device)
        there = torch.cat([first, order.order + text])
        back = torch.cat([first, order.inverse + text])
        q, k, v = (x.index_select(1, there) for x in (q, k, v))
        return self._attend(plan, q, k, v, scale, layer, text).index_select(1, back)

    def _attend(
        self, plan: Plan, q: Tensor, k: Tensor, v: Tensor, scale: float, layer: int, text: int
    ) -> Tensor:
        if isinstance(plan, MeasuredPlan):
            return plan.attend_counted(q, k, v, scale, layer, text, self.counts.tally(q.device))
        return plan.attend(q, k, v, scale, layer, text)

    def _count(self, plan: Plan, q: Tensor, text: int) -> None:
        entries = q.shape[0] * q.shape[2]
        self.counts.allowed_pairs += entries * plan.allowed_pairs(text)
        self.counts.all_pairs += entries * (self.grid.tokens + text) ** 2
        self.counts.implementations.add(plan.implementation(q))

    def _count_received(self, size: int, *, is_dense: bool) -> None:
        if is_dense:
            self.counts.dense_received_bytes += size
        else:
            self.counts.sparse_received_bytes += size


def _without_padding(
    call: Callable[[Tensor, Tensor, Tensor, int], Tensor], text: TextTokens, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """The call on what is behind the padding; entries of unequal lengths one by one."""
    lengths = _of_entries(text.valid, q.shape[0])

    def behind(valid: int, *tensors: Tensor) -> Tensor:
        padding = text.count - valid
        q, k, v = (x[:, padding:] for x in tensors)
        return pad(call(q, k, v, valid), (0, 0, 0, 0, padding, 0))

    if len(set(lengths)) == 1:
        return behind(lengths[0], q, k, v)
    entries = zip(lengths, q.split(1), k.split(1), v.split(1), strict=True)
    return torch.cat([behind(valid, *tensors) for valid, *tensors in entries])


def _of_entries(valid: tuple[int, ...], entries: int) -> tuple[int, ...]:
    """Lengths of the batch entries that are left of those that the pass began with.

    Diffusers' FasterCache drops the unconditional first half behind the hook that counts text.
    """
    if entries not in (len(valid), len(valid) / 2):
        raise RuntimeError(f"self-attention has {entries} batch entries, the text {len(valid)}")
    return valid[-entries:]


# The operator sees only q, k, v; the rest comes through here. It is read inside the custom op, so that one
# compiled graph serves all layers and steps.
CURRENT: ContextVar[ForwardPass | None] = ContextVar("reelwright_forward", default=None)


@torch.library.custom_op("reelwright::swapped_attention", mutates_args=())
def swapped_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, dense_layer: bool, layer: int) -> Tensor:
    """Self-attention of the pass that is running; [batch, tokens, heads, head_dim]."""
    return _running().attend(q, k, v, scale, dense_layer, layer)


@torch.library.custom_op("reelwright::swapped_attention_", mutates_args=("q",))
def swapped_attention_(
    q: Tensor, k: Tensor, v: Tensor, scale: float, dense_layer: bool, layer: int, first_head: int = 0
) -> None:
    """The same, written over q; of as many heads as v has, the first of which is this one of q and k.

    All heads of a layer are one call, which those from the first one on begin.
    """
    # In here: of a view, a compiled graph would write to a copy.
    q, k = (x.narrow(2, first_head, v.shape[2]) for x in (q, k))
    out = _running().attend(q, k, v, scale, dense_layer, layer, over=True, counts=first_head == 0)
    if out is not q:
        q.copy_(out)


@swapped_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float, dense_layer: bool, layer: int) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def _running() -> ForwardPass:
    forward = CURRENT.get()
    if forward is None:
        raise RuntimeError(
            "a swapped self-attention layer was called outside its transformer's forward pass; "
            "remove the swap before calling layers by themselves"
        )
    return forward
