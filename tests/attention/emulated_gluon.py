"""Gluon kernels of ``attention/hopper_tiles.py``'s kind as threads on the CPU, where there is no interpreter.

    with emulated(hopper, processors=3):
        hopper.block_topk_hopper(...)

A kernel is run as the Python that it is, with this module in place of ``gl``: each partition of
``warp_specialize`` is a thread, barriers in memory wait and count phases and bytes, products read their
operands no sooner than somebody waits for them, and loads look whether they are within their tensor. So a
walk, a schedule, or a ring that is wrong shows as a wrong result, an error, or a barrier that nobody opens.
Layouts mean nothing here; what the compiler makes of a kernel, other tests show.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from attention import hopper_tiles

PATIENCE_SECONDS = 20


class Scalar(int):
    """A loaded integer."""

    def to(self, _dtype: object) -> "Scalar":
        return self


class Pointer:
    """A place, or a tensor of places, in the memory of a tensor."""

    def __init__(self, tensor: Tensor, offset: Any = 0) -> None:
        self.tensor, self.offset = tensor, offset
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.tensor, self.offset + offset)

    @property
    def memory(self) -> Tensor:
        """All of the tensor's, from its first element."""
        size = self.tensor.untyped_storage().nbytes() // self.tensor.element_size()
        return self.tensor.as_strided((size - self.tensor.storage_offset(),), (1,))


class Shared:
    """Shared memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.dtype = tensor, tensor.dtype

    def index(self, i: int) -> "Shared":
        return Shared(self.tensor[i])

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.tensor.permute(order))

    def store(self, value: Tensor) -> None:
        self.tensor.copy_(value)

    def load(self, _layout: object) -> Tensor:
        return self.tensor.clone()


class Barriers:
    """Barriers of a program, each with its phase."""

    def __init__(self, count: int) -> None:
        self.barriers = [Barrier() for _ in range(count)]

    def index(self, i: int) -> "Barrier":
        return self.barriers[i]


class Barrier:
    """An mbarrier: a phase ends when so many have arrived and all bytes that were announced are there."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.arrived = self.missing_bytes = self.phase = 0

    def add(self, arrivals: int, missing_bytes: int) -> None:
        with self.changed:
            self.arrived += arrivals
            self.missing_bytes += missing_bytes
            assert self.arrived <= self.count, "more arrivals than the barrier is for"
            if self.arrived == self.count and not self.missing_bytes:
                self.phase, self.arrived = self.phase + 1, 0
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            opened = self.changed.wait_for(lambda: self.phase % 2 != parity, PATIENCE_SECONDS)
        assert opened, "nobody opens a barrier"


class Descriptor:
    """A matrix, and the shape of its tiles."""

    def __init__(self, descriptor: Any) -> None:
        self.matrix = descriptor.base.as_strided(descriptor.shape, descriptor.strides)
        self.tile, self.layout, self.dtype = descriptor.block_shape, None, descriptor.base.dtype
        nbytes = self.tile[0] * self.tile[1] * descriptor.base.element_size()
        self.block_type = SimpleNamespace(nbytes=nbytes)

    def at(self, place: list[int]) -> Tensor:
        """A tile, zero beyond the matrix."""
        assert min(place) >= 0
        found = torch.zeros(self.tile, dtype=self.dtype)
        part = self.matrix[place[0] : place[0] + self.tile[0], place[1] : place[1] + self.tile[1]]
        found[: part.shape[0], : part.shape[1]] = part
        return found


class Product:
    """A product that somebody has yet to wait for."""

    def __init__(self, a: Any, b: Shared, acc: Tensor, use_acc: bool) -> None:
        self.operands, self.use_acc = (a, b, acc), use_acc
        self.result: Tensor | None = None

    def finish(self) -> None:
        a, b, acc = self.operands
        rows = a.tensor if isinstance(a, Shared) else a
        assert rows.dtype == b.dtype
        product = rows.float() @ b.tensor.float()
        self.result = acc + product if self.use_acc else product


_local = threading.local()


def _running() -> list[Product]:
    if not hasattr(_local, "running"):
        _local.running = []
    found: list[Product] = _local.running
    return found


def _multiply(a: Any, b: Shared, acc: Tensor, use_acc: bool = True, is_async: bool = False) -> Product:
    assert is_async
    product = Product(a, b, acc, use_acc)
    _running().append(product)
    return product


def _wait(most: int, deps: list[Any]) -> Any:
    running = _running()
    while len(running) > most:
        running.pop(0).finish()
    found = tuple(dep.result if isinstance(dep, Product) else dep for dep in deps)
    return found[0] if len(found) == 1 else found


def _load(pointer: Pointer, mask: Any = True, other: Any = 0) -> Any:
    memory = pointer.memory
    if not isinstance(pointer.offset, Tensor):
        if not mask:
            return Scalar(other)
        assert 0 <= pointer.offset < memory.numel(), "a load beyond the tensor"
        return Scalar(memory[pointer.offset])
    inside = torch.as_tensor(mask).expand(pointer.offset.shape)
    assert bool(((pointer.offset >= 0) & (pointer.offset < memory.numel()))[inside].all())
    return torch.where(inside, memory[torch.where(inside, pointer.offset, 0)], other)


def _store(pointer: Pointer, value: Tensor, mask: Tensor) -> None:
    inside = mask.expand(value.shape)
    offsets = pointer.offset.expand(value.shape)[inside]
    assert offsets.numel() == offsets.unique().numel()
    pointer.memory[offsets] = value[inside]


def _where(condition: Any, yes: Any, no: Any) -> Any:
    return torch.where(condition, yes, no) if isinstance(condition, Tensor) else yes if condition else no


def _sum(x: Tensor, axis: int) -> Any:
    total = x.sum(axis)
    return total if total.ndim else Scalar(total)


_one_at_a_time = threading.Lock()


def _atomic_add(pointer: Pointer, value: int, sem: str) -> Scalar:
    with _one_at_a_time:
        before = Scalar(_load(pointer))
        pointer.memory[pointer.offset] += value
        return before


def _allocate(dtype: torch.dtype, shape: list[int], _layout: object) -> Any:
    is_barrier = dtype == torch.int64
    poison = float("nan") if dtype.is_floating_point else -1
    return Barriers(shape[0]) if is_barrier else Shared(torch.full(shape, poison, dtype=dtype))


def _in_threads(calls: Sequence[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
    """Each call in a thread of its own; the first error of any is raised."""
    errors: list[BaseException] = []

    def run(function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        try:
            function(*arguments)
            assert not _running(), "a product that nobody waited for"
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _copy_tile(descriptor: Descriptor, place: list[int], barrier: Barrier, room: Shared) -> None:
    room.store(descriptor.at(place))
    barrier.add(0, -descriptor.block_type.nbytes)


def _named(program: int, programs: int) -> dict[str, Any]:
    """What names of Gluon mean in one program."""
    gl = SimpleNamespace(
        program_id=lambda _axis: program,
        num_programs=lambda _axis: programs,
        load=_load,
        store=_store,
        where=_where,
        minimum=min,
        maximum=lambda a, b: torch.maximum(a, b) if isinstance(a, Tensor) else max(a, b),
        max=lambda x, axis: x.amax(axis),
        sum=_sum,
        atomic_add=_atomic_add,
        BlockedLayout=lambda *_: None,
        int32=torch.int32,
        exp2=torch.exp2,
        arange=lambda start, end, layout: torch.arange(start, end),
        full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
        static_range=range,
        convert_layout=lambda x, _layout: x,
        allocate_shared_memory=_allocate,
        warp_specialize=lambda partitions, *_: _in_threads(partitions),
        SliceLayout=lambda *_: None,
        DotOperandLayout=lambda *_: None,
        int64=torch.int64,
        float32=torch.float32,
    )
    mbarrier = SimpleNamespace(
        MBarrierLayout=lambda: None,
        init=lambda barrier, count: setattr(barrier, "count", count),
        wait=lambda barrier, parity: barrier.wait(parity),
        expect=lambda barrier, nbytes: barrier.add(1, nbytes),
        arrive=lambda barrier, count: barrier.add(count, 0),
    )
    return {
        "gl": gl,
        "mbarrier": mbarrier,
        "copy_tile": _copy_tile,
        "warpgroup_mma": _multiply,
        "warpgroup_mma_wait": _wait,
        "product_layout": lambda _columns: None,
        "barrier": lambda: None,
    }


def _as_python(given: dict[str, Any], names: dict[str, Any]) -> dict[str, Any]:
    """A module's globals with its jitted functions as plain ones, which see these names."""
    found = given | names
    for name, value in given.items():
        if name not in names and isinstance(getattr(value, "fn", None), FunctionType):
            if value.fn.__module__ == given["__name__"]:
                found[name] = FunctionType(value.fn.__code__, found, name)
            else:
                assert value.fn.__module__ == hopper_tiles.__name__
                found[name] = _as_python(vars(hopper_tiles), names)[name]
    return found


class Kernel:
    """In place of a jitted kernel: ``kernel[grid](...)`` runs its programs, all at the same time."""

    def __init__(self, module: ModuleType, name: str) -> None:
        self.globals = dict(vars(module))
        self.name = name
        self.arguments = vars(module)[name].arg_names

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*arguments: Any, num_warps: int, **constants: Any) -> None:
            given = [_on_device(argument) for argument in arguments]
            values = dict(zip(self.arguments, given, strict=False)) | constants
            assert list(values) == list(self.arguments)
            programs = [
                (_as_python(self.globals, _named(program, grid[0]))[self.name], tuple(values.values()))
                for program in range(grid[0])
            ]
            _in_threads(programs)

        return launch


def _on_device(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return Pointer(argument)
    return Descriptor(argument) if hasattr(argument, "block_shape") else argument


@contextmanager
def emulated(module: ModuleType, processors: int, name: str = "_kernel") -> Iterator[None]:
    """The kernel of a module runs here, as on a GPU with so many multiprocessors."""
    kernel = Kernel(module, name)
    with patch.object(module, name, kernel), patch.object(module, "processors", lambda _device: processors):
        yield
