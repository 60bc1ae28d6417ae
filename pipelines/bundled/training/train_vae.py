"""Stage 1: the video autoencoder, trained on clips that are drawn as it goes.

First crops near the object (cheap, and every pixel matters there), then whole clips, whose later latent
frames exercise the decoder's causal cache. Ends with the latents' statistics and a score.
"""

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from torch import Tensor

from pipelines.bundled.drawing import draw, render, sample_motion
from pipelines.bundled.read_back import score
from pipelines.bundled.training.clips import encode, pick_specs, to_frames
from pipelines.bundled.training.components import make_vae
from pipelines.bundled.training.optimise import MovingAverage, adamw, set_learning_rate
from pipelines.bundled.training.ranks import Clock, FlatGradients, Phase, Ranks
from pipelines.bundled.training.records import RunLog
from pipelines.bundled.world import trained_specs

LEARNING_RATE = 2e-3
WARMUP_STEPS = 100
# Noise on the latents in training, so that the decoder forgives what a sampler leaves.
LATENT_NOISE = 0.03


@dataclass(frozen=True, slots=True)
class ClipSize:
    """Pixels of a side, frames, and how many such clips make a batch on one device."""

    side: int
    frames: int
    batch: int


@dataclass(frozen=True, slots=True)
class VaePlan:
    """For ``crop_share`` of the time crops out of clips of ``crop_from`` pixels, then ``whole`` in turn."""

    crop: ClipSize = ClipSize(64, 13, 40)
    crop_from: int = 128
    crop_share: float = 0.55
    whole: tuple[ClipSize, ...] = (
        ClipSize(128, 17, 12),
        ClipSize(128, 33, 8),
        ClipSize(128, 17, 12),
        ClipSize(96, 33, 12),
    )
    check: ClipSize = ClipSize(128, 33, 96)
    check_batch: int = 16


def train_vae(
    ranks: Ranks, clock: Clock, log: RunLog, *, until: float, seed: int, plan: VaePlan
) -> AutoencoderKLWan:
    """Train until ``until`` seconds on the clock and return the averaged weights, statistics set."""
    torch.manual_seed(seed)
    vae = make_vae().to(ranks.device)
    average = MovingAverage(vae, 0.995)
    gradients = FlatGradients(vae.parameters(), ranks)
    optimiser = adamw(vae.parameters(), weight_decay=1e-4, device=ranks.device)
    generator = torch.Generator().manual_seed(seed * 1000 + ranks.rank)
    torch.manual_seed(seed * 1000 + ranks.rank)
    log.write("vae_start", parameters=sum(p.numel() for p in vae.parameters()), ranks=ranks.size)
    phase = Phase(clock, until)
    for step in phase:
        set_learning_rate(
            optimiser, LEARNING_RATE, step=step, warmup_steps=WARMUP_STEPS, progress=phase.progress
        )
        clips = _training_clips(plan, phase.progress, step, generator, ranks.device)
        loss, mse = reconstruction_loss(vae, clips)
        gradients.zero()
        loss.backward()
        gradients.average_and_clip(1.0)
        optimiser.step()
        average.update()
        if step % 50 == 0:
            log.write("vae_step", step=step, loss=round(float(loss.detach()), 5), psnr=_psnr(float(mse)))
    averaged: AutoencoderKLWan = average.module
    _set_statistics(averaged, plan, seed, ranks.device)
    _check(averaged, plan, seed, ranks.device, log, steps=phase.step)
    return averaged


def reconstruction_loss(vae: AutoencoderKLWan, clips: Tensor) -> tuple[Tensor, Tensor]:
    """Training loss for clips [B, 3, T, H, W] in [-1, 1], and the mean squared error in it."""
    with torch.autocast(clips.device.type, torch.bfloat16):
        latents = vae.encode(clips).latent_dist.mode()
        decoded = vae.decode(latents + LATENT_NOISE * torch.randn_like(latents)).sample.float()
    mse = F.mse_loss(decoded, clips)
    edges = sum((decoded.diff(dim=dim) - clips.diff(dim=dim)).abs().mean() for dim in (3, 4))
    size = latents.float().square().mean()
    loss = F.l1_loss(decoded, clips) + 2 * mse + edges + 5e-5 * size
    return loss, mse.detach()


def _training_clips(
    plan: VaePlan, progress: float, step: int, generator: torch.Generator, device: torch.device
) -> Tensor:
    cropping = progress < plan.crop_share
    size = plan.crop if cropping else plan.whole[step % len(plan.whole)]
    specs = pick_specs(trained_specs(), size.batch, generator)
    if not cropping:
        return render(
            specs, generator, height=size.side, width=size.side, num_frames=size.frames, device=device
        )
    motion = sample_motion(specs, generator)
    share = size.side / plan.crop_from
    jitter = (torch.rand(size.batch, 2, generator=generator) - 0.5) * 0.9 * share
    origin = (motion.centre - share / 2 + jitter).clamp(0, 1 - share)
    return draw(
        specs,
        motion,
        height=size.side,
        width=size.side,
        num_frames=size.frames,
        short_side=plan.crop_from,
        device=device,
        origin=origin,
    )


@torch.no_grad()
def _set_statistics(vae: AutoencoderKLWan, plan: VaePlan, seed: int, device: torch.device) -> None:
    """Write the latents' mean and deviation per channel into the configuration."""
    generator = torch.Generator().manual_seed(seed + 1)
    latents = []
    for _ in range(0, plan.check.batch, plan.check_batch):
        specs = pick_specs(trained_specs(), plan.check_batch, generator)
        side, frames = plan.check.side, plan.check.frames
        clips = render(specs, generator, height=side, width=side, num_frames=frames, device=device)
        latents.append(encode(vae, clips))
    whole = torch.cat(latents).transpose(0, 1).flatten(1)
    vae.register_to_config(
        latents_mean=[round(value, 4) for value in whole.mean(1).tolist()],
        latents_std=[round(value, 4) for value in whole.std(1).tolist()],
    )


@torch.no_grad()
def _check(
    vae: AutoencoderKLWan, plan: VaePlan, seed: int, device: torch.device, log: RunLog, *, steps: int
) -> None:
    """Log how well drawn clips survive the autoencoder."""
    generator = torch.Generator().manual_seed(seed + 2)
    specs = pick_specs(trained_specs(), plan.check.batch, generator)
    errors, frames = [], []
    for start in range(0, len(specs), plan.check_batch):
        some = specs[start : start + plan.check_batch]
        side, length = plan.check.side, plan.check.frames
        clips = render(some, generator, height=side, width=side, num_frames=length, device=device)
        with torch.autocast(device.type, torch.bfloat16):
            decoded = vae.decode(encode(vae, clips)).sample.float()
        errors.append(float(F.mse_loss(decoded, clips)))
        frames.extend(to_frames(decoded))
    result = asdict(score(specs, frames))
    log.write("vae_check", steps=steps, psnr=_psnr(sum(errors) / len(errors)), reconstructions=result)


def _psnr(mse: float) -> float:
    return round(10 * math.log10(4 / max(mse, 1e-12)), 2)
