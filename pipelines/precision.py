"""Which device and number formats a pipeline runs in.

Knows: what this machine computes fast. Does not know: models. A CPU gets bfloat16 only where a short
measurement shows that its matrix products or convolutions are clearly faster in it: with AMX or AVX512-BF16
they are 2 to 10 times faster, without they are many times slower, so the answer does not hang on noise.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from configs.compute import VaeDtype

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
VAE_DTYPES = {**DTYPES, "float16": torch.float16}
CLEARLY_FASTER = 1.3
REPEATS = 5


class PrecisionError(ValueError):
    """A device or dtype that this machine or this program does not have."""


@dataclass(frozen=True)
class Precision:
    """Where and in what a pipeline runs. ``network`` is for the text encoder and the transformer."""

    device: torch.device
    network: torch.dtype
    vae: torch.dtype


def choose_precision(device: str, dtype: str, vae_dtype: VaeDtype = "auto") -> Precision:
    """Turn ``auto`` into what suits this machine.

    ``device`` is ``auto``, ``cpu``, ``cuda`` or ``cuda:<index>``; ``dtype`` is ``auto``, ``float32`` or
    ``bfloat16``. On CUDA a VAE for which nothing is asked runs in float32, as Wan's authors advise.

    Raises:
        PrecisionError: unknown name, or a device that is not there.
    """
    if dtype not in ("auto", *DTYPES):
        raise PrecisionError(f"dtype {dtype!r} is not one of auto, {', '.join(DTYPES)}")
    chosen = resolve_device(device)
    if chosen.type == "cuda":
        network = DTYPES.get(dtype, torch.bfloat16)
        return Precision(chosen, network, VAE_DTYPES.get(vae_dtype, torch.float32))
    network = faster_on_cpu(_matrix_product) if dtype == "auto" else DTYPES[dtype]
    if vae_dtype != "auto":
        return Precision(chosen, network, VAE_DTYPES[vae_dtype])
    return Precision(chosen, network, faster_on_cpu(_convolution) if dtype == "auto" else network)


def resolve_device(name: str) -> torch.device:
    """The device of that name, a GPU with its index: the first one if none is named.

    Raises:
        PrecisionError: unknown name, or a device that is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise PrecisionError(f"device {name!r} is not one of auto, cpu, cuda, cuda:<index>") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise PrecisionError(f"device {name!r} is not one of auto, cpu, cuda, cuda:<index>")
    count = torch.cuda.device_count()
    index = device.index or 0
    if index >= count:
        raise PrecisionError(f"device {name!r}: torch {torch.__version__} sees {count} CUDA devices")
    return torch.device("cuda", index)


def faster_on_cpu(work: Callable[[torch.dtype], Callable[[], torch.Tensor]]) -> torch.dtype:
    """bfloat16 if ``work(bfloat16)`` is clearly faster than ``work(float32)``, else float32.

    On one thread, since on a busy machine threads that wait for each other hide what they compute; and in
    turn, so that both meet the same load.
    """
    plain, short = work(torch.float32), work(torch.bfloat16)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        plain(), short()
        rounds = [(_seconds(plain), _seconds(short)) for _ in range(REPEATS)]
    finally:
        torch.set_num_threads(threads)
    best_plain, best_short = (min(seconds) for seconds in zip(*rounds, strict=True))
    return torch.bfloat16 if best_plain > CLEARLY_FASTER * best_short else torch.float32


def _seconds(work: Callable[[], torch.Tensor]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _matrix_product(dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    rows, weight = torch.ones(2048, 256, dtype=dtype), torch.ones(1024, 256, dtype=dtype)
    return lambda: F.linear(rows, weight)


def _convolution(dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    pictures = torch.ones(1, 32, 4, 32, 32, dtype=dtype)
    weight = torch.ones(32, 32, 3, 3, 3, dtype=dtype)
    return lambda: F.conv3d(pictures, weight, padding=1)
