"""Early answer to whether a run will follow prompts: does the loss on held-out clips notice one changed word?

Knows held-out clips and the loss. Does not know sampling.
"""

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from torch import Tensor, nn

from pipelines.bundled.prompts import prompt
from pipelines.bundled.training.clips import draw_latents, token_ids
from pipelines.bundled.training.components import make_tokenizer
from pipelines.bundled.world import ClipSpec, held_out_specs

_OPPOSITE = {"left": "right", "right": "left", "up": "down", "down": "up"}
# Times at which a sampler with few steps decides where things go.
_TIMES = (0.85, 0.95, 0.98)


class Gate:
    """Fixed held-out clips and noise; ``losses`` compares right prompts with those of opposite direction."""

    def __init__(
        self, vae: AutoencoderKLWan, *, side: int, frames: int, clips: int, device: torch.device
    ) -> None:
        specs = held_out_specs()[:clips]
        generator = torch.Generator().manual_seed(11)
        clean = draw_latents(vae, specs, generator, side=side, frames=frames, device=device).float()
        noise = torch.randn(clean.shape, generator=generator).to(device)
        time = torch.tensor(_TIMES).repeat(len(specs))[: len(specs)].to(device)
        tokenizer = make_tokenizer()
        self._time = time
        self._noisy = torch.lerp(clean, noise, time.view(-1, 1, 1, 1, 1))
        self._velocity = noise - clean
        self._right = token_ids(tokenizer, [prompt(spec) for spec in specs], device)
        self._wrong = token_ids(tokenizer, [prompt(_turned(spec)) for spec in specs], device)

    @torch.no_grad()
    def losses(self, denoiser: nn.Module) -> tuple[float, float]:
        """Mean squared error with the right and with the wrong direction in the prompt."""
        return self._loss(denoiser, self._right), self._loss(denoiser, self._wrong)

    def _loss(self, denoiser: nn.Module, ids: Tensor) -> float:
        with torch.autocast(ids.device.type, torch.bfloat16):
            velocity = denoiser(self._noisy, self._time, ids)
        return float(F.mse_loss(velocity, self._velocity))


def _turned(spec: ClipSpec) -> ClipSpec:
    return ClipSpec(spec.color, spec.shape, _OPPOSITE[spec.direction], spec.speed, spec.background)
