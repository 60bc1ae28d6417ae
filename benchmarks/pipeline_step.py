"""One forward pass of a transformer, stock or ours: time by device events, peak memory, result.

Knows: what each kind of transformer is given. Does not know: text encoders, VAEs, jobs, other processes.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from diffusers import CogVideoXPipeline
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention import AnchorLocalBackend, AnchorLocalPattern, SwapHandle, SwapReport, swap
from attention.choice import Precision
from benchmarks.architectures import Architecture
from benchmarks.pipeline_machine import describe_machine
from benchmarks.pipeline_records import Facts, Request, Round
from benchmarks.random_models import fingerprint, random_module, weight_bytes
from benchmarks.variants import Variant
from pipelines.compiling import RepeatedBlocks
from pipelines.feed_forward import OneFp8Operator, OneOperator, SlicedFeedForward, sliced_feed_forward
from pipelines.fp8 import require_fp8, to_fp8
from pipelines.fused.choice import fuse
from pipelines.joined_attention import join_projections
from pipelines.memory import peak_meter
from pipelines.output_norm import PostponedNorm, sliced_output_norm
from pipelines.precision import resolve_device

OUTPUT_VALUES = 4096
TIMESTEP = 500
_FOR_GOOD = contextlib.ExitStack()  # the process is for one variant


class StepBench:
    """A transformer with random weights and random inputs."""

    def __init__(self, request: Request) -> None:
        architecture, device = request.architecture, resolve_device(request.device)
        self._device = device
        self._repeats = request.repeats
        dtype = network_dtype(device)
        self._transformer: Any = random_module(architecture.transformer, device, dtype, request.seed)
        self._facts = Facts(
            machine=describe_machine(),
            fingerprints={"transformer": fingerprint(self._transformer)},
            weight_bytes={"transformer": weight_bytes(self._transformer)},
        )
        self._variant = request.variant
        self._handle: SwapHandle | None = None
        self._computed = ""
        if request.variant.ours:
            self._handle = _swapped(self._transformer, request)
            self._computed = compute_as(self._transformer, request)
        elif "compile" in request.variant.switches:
            compile_stock(self._transformer)
        self._inputs = step_inputs(architecture, self._transformer, device, dtype, request.seed)

    def facts(self) -> Facts:
        return self._facts

    def warm_up(self) -> None:
        for _ in range(2):
            self._pass()
        synchronize(self._device)

    def measure(self) -> Round:
        meter = peak_meter(self._device)
        meter.start()
        seconds, out = call_seconds(self._pass, self._device, self._repeats)
        peak = meter.stop()
        flat = out.flatten()
        sample = flat[:: max(1, flat.numel() // OUTPUT_VALUES)][:OUTPUT_VALUES]
        return Round(
            step_seconds=seconds,
            peak_bytes={"denoise": peak},
            ran=self._ran(),
            output=tuple(sample.float().tolist()),
        )

    def _ran(self) -> str:
        if self._handle is None:
            return stock_attention(self._variant)
        return "; ".join(filter(None, (what_ran(self._handle.report()), self._computed)))

    @torch.no_grad()
    def _pass(self) -> Tensor:
        with attention_kernels(self._variant):
            out: Tensor = self._transformer(**self._inputs, return_dict=False)[0]
        return out


def network_dtype(device: torch.device) -> torch.dtype:
    """What text encoder and transformer run in: bfloat16 on a GPU, float32 on a CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def call_seconds(
    call: Callable[[], Tensor], device: torch.device, repeats: int
) -> tuple[tuple[float, ...], Tensor]:
    """Seconds of each call, on a GPU between device events, and the last result."""
    if device.type != "cuda":
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            out = call()
            seconds.append(time.perf_counter() - start)
        return tuple(seconds), out
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        out = call()
        mark.record()
    torch.cuda.synchronize(device)
    return tuple(a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)), out


def _swapped(transformer: Any, request: Request) -> SwapHandle:
    architecture = request.architecture
    if request.variant.attention == "dense":
        return swap(transformer, "dense")
    pattern = AnchorLocalPattern(architecture.block_size, architecture.anchor_stride)
    precision: Precision = "fp8" if "fp8attention" in request.variant.switches else "full"
    return swap(transformer, AnchorLocalBackend(pattern, precision=precision))


def compute_as(transformer: Any, request: Request) -> str:
    """What the server does with every model and job, and what the variant says beside attention; in words.

    Raises:
        ValueError: the device has no fp8.
    """
    switches, blocks, device = request.variant.switches, repeated_blocks(transformer), request.device
    done = []
    if resolve_device(device).type == "cuda" and (joined := join_projections(transformer)):
        done.append(f"q, k and v of {joined} layers in one product")
    if "fp8" in switches:
        require_fp8(resolve_device(device), transformer.dtype)
        done.append(f"{to_fp8(blocks)} layers in fp8")
    if fused := fuse([transformer], resolve_device(device), transformer.dtype, "auto"):
        done.append(f"{fused} blocks fused")
    if "compile" in switches:
        RepeatedBlocks(blocks, resolve_device(device), "on")
        done.append("compiled")
    chunks = request.chunks if "chunks" in switches else 1
    _FOR_GOOD.enter_context(sliced_feed_forward([transformer], chunks))
    _FOR_GOOD.enter_context(sliced_output_norm([transformer]))
    modules = list(transformer.modules())
    if chunks > 1:
        if not any(isinstance(module, SlicedFeedForward) for module in modules):
            raise RuntimeError("the feed-forward is whole")
        done.append(f"feed-forward in {chunks}")
    if any(isinstance(module, OneOperator | OneFp8Operator) for module in modules):
        done.append("feed-forward one operator")
    if any(isinstance(module, PostponedNorm) for module in modules):
        done.append("output norm in slices")
    return ", ".join(done)


def compile_stock(transformer: Any) -> None:
    """Diffusers' regional compilation, also of classes for which Diffusers names no blocks."""
    if transformer._repeated_blocks:
        transformer.compile_repeated_blocks(fullgraph=True)
        return
    for block in repeated_blocks(transformer):
        block.compile(fullgraph=True)


def repeated_blocks(transformer: Any) -> list[nn.Module]:
    """The layers."""
    lists = [child for name, child in transformer.named_children() if name.endswith("blocks")]
    return [block for blocks in lists for block in blocks]


@contextlib.contextmanager
def attention_kernels(variant: Variant) -> Iterator[None]:
    """Within the block, PyTorch's attention takes the kernel that the variant names."""
    with _kernels(variant):
        yield


def _kernels(variant: Variant) -> AbstractContextManager[None]:
    if "scores" in variant.switches:
        # Otherwise bfloat16 scores would be stored in float32, which no implementation for models does.
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
        return sdpa_kernel(SDPBackend.MATH)
    if "cudnn" in variant.switches:
        rest = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        return sdpa_kernel([SDPBackend.CUDNN_ATTENTION, *rest], set_priority=True)
    return contextlib.nullcontext()


def stock_attention(variant: Variant) -> str:
    """What stock attention is, in words."""
    if "scores" in variant.switches:
        return "dense, scores stored"
    return "dense, cuDNN first" if "cudnn" in variant.switches else "dense, PyTorch's choice"


def what_ran(report: SwapReport) -> str:
    """What our attention was, in words."""
    if not report.sparse_calls:
        return f"dense, {report.dense_calls} calls"
    pattern = f"{report.block_size}, {report.anchor_stride}, {report.precision}"
    return (
        f"{report.implementation}, {pattern}, density {report.density:.3f}, "
        f"{report.sparse_calls} sparse and {report.dense_calls} dense calls"
    )


def step_inputs(
    architecture: Architecture, transformer: Any, device: torch.device, dtype: torch.dtype, seed: int
) -> dict[str, Tensor | tuple[Tensor, Tensor]]:
    """Arguments of one pass over one clip (batch 1), as the pipeline of this kind gives them."""
    generator = torch.Generator(device).manual_seed(seed + 1)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    config, (frames, rows, columns) = transformer.config, architecture.latent_grid
    match type(transformer).__name__:
        case "WanTransformer3DModel":
            timestep = torch.full((1,), TIMESTEP, device=device)
            if architecture.expand_timesteps:
                timestep = timestep[:, None].expand(1, architecture.tokens)
            return {
                "hidden_states": noise(1, config.in_channels, frames, rows, columns),
                "timestep": timestep,
                "encoder_hidden_states": noise(1, architecture.text_tokens, config.text_dim),
            }
        case "CogVideoXTransformer3DModel":
            return {
                "hidden_states": noise(1, frames, config.in_channels, rows, columns),
                "timestep": torch.full((1,), TIMESTEP, device=device),
                "encoder_hidden_states": noise(1, architecture.text_tokens, config.text_embed_dim),
                "image_rotary_emb": _cogvideox_rotary(architecture, transformer, device),
            }
        case "HunyuanVideoTransformer3DModel":
            text = architecture.text_tokens
            return {
                "hidden_states": noise(1, config.in_channels, frames, rows, columns),
                "timestep": torch.full((1,), TIMESTEP, device=device, dtype=dtype),
                "encoder_hidden_states": noise(1, text, config.text_embed_dim),
                "encoder_attention_mask": torch.ones(1, text, device=device, dtype=torch.long),
                "pooled_projections": noise(1, config.pooled_projection_dim),
                "guidance": torch.full((1,), architecture.guidance_scale * 1000, device=device, dtype=dtype),
            }
        case other:
            raise ValueError(f"no inputs are known for {other}")


def _cogvideox_rotary(
    architecture: Architecture, transformer: Any, device: torch.device
) -> tuple[Tensor, Tensor]:
    """What the pipeline makes before its loop, by its own method."""
    pipe = CogVideoXPipeline(None, None, None, transformer, None)
    frames = architecture.latent_grid[0]
    tables: tuple[Tensor, Tensor] = pipe._prepare_rotary_positional_embeddings(
        architecture.height, architecture.width, frames, device
    )
    return tables
