"""Samples held-out prompts with the pipeline itself and scores what it shows.

Knows sampling settings and the score. Does not know training.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path

import numpy as np
import torch
from diffusers import WanPipeline
from numpy.typing import NDArray
from PIL import Image

from pipelines.bundled.prompts import prompt
from pipelines.bundled.read_back import ReadBack, read_attributes, score_read_backs
from pipelines.bundled.training import sparsity
from pipelines.bundled.training.components import SPATIAL_FACTOR, TEMPORAL_FACTOR, TEXT_TOKENS
from pipelines.bundled.training.ranks import Clock, Ranks
from pipelines.bundled.training.records import RunLog
from pipelines.bundled.world import ClipSpec, held_out_specs

Frames = NDArray[np.uint8]
READERS = 8


@dataclass(frozen=True, slots=True)
class Setting:
    """How to sample: guidance 1 is one pass a step; ``sparse`` begins after the first fifth of the steps."""

    steps: int
    guidance: float
    sparse: bool = False
    side: int = 128
    frames: int = 33


# In order of importance: the time may not suffice for all.
SETTINGS = (
    Setting(10, 1.0),
    Setting(10, 2.0),
    Setting(10, 1.0, sparse=True),
    Setting(10, 2.0, sparse=True),
    Setting(8, 2.0),
    Setting(12, 1.0),
    Setting(10, 1.0, side=96),
    Setting(10, 1.0, side=64, frames=17),
)


def sample(
    pipeline: WanPipeline,
    specs: Sequence[ClipSpec],
    setting: Setting,
    *,
    seed: int,
    batch: int,
    device: torch.device,
) -> list[Frames]:
    """One clip [T, H, W, 3] per spec from its canonical prompt."""
    attention = sparsity.install(pipeline.transformer)
    latent_side = setting.side // SPATIAL_FACTOR
    grid = ((setting.frames - 1) // TEMPORAL_FACTOR + 1, latent_side, latent_side)
    mask = sparsity.anchor_local_mask(grid, device) if setting.sparse else None
    dense_steps = ceil(sparsity.DENSE_STEPS_SHARE * setting.steps)

    def after_step(_: WanPipeline, step: int, __: object, tensors: dict[str, object]) -> dict[str, object]:
        if step + 1 >= dense_steps:
            attention.mask = mask
        return tensors

    clips: list[Frames] = []
    for start in range(0, len(specs), batch):
        attention.mask = None
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            frames = pipeline(
                prompt=[prompt(spec) for spec in specs[start : start + batch]],
                negative_prompt="",
                height=setting.side,
                width=setting.side,
                num_frames=setting.frames,
                num_inference_steps=setting.steps,
                guidance_scale=setting.guidance,
                max_sequence_length=TEXT_TOKENS,
                generator=torch.Generator().manual_seed(seed + start),
                output_type="np",
                callback_on_step_end=after_step,
            ).frames
        clips.extend((frames * 255).round().astype(np.uint8))
    attention.mask = None
    return clips


def evaluate(
    pipeline: WanPipeline,
    ranks: Ranks,
    clock: Clock,
    log: RunLog,
    *,
    until: float,
    sheet: Path,
    settings: Sequence[Setting] = SETTINGS,
    prompts: int = 200,
    batch: int = 50,
) -> None:
    """Score the settings one by one while each can be expected to end before ``until`` seconds on the clock.

    The prompts are shared among the ranks. The first setting also leaves a contact sheet.
    """
    mine = held_out_specs()[:prompts][ranks.rank :: ranks.size]
    longest = 0.0
    for index, setting in enumerate(settings):
        began = clock.seconds()
        if began + longest > until:
            log.write("evaluation_cut", done=index, of=len(settings))
            return
        clips = sample(pipeline, mine, setting, seed=1000 * ranks.rank, batch=batch, device=ranks.device)
        if index == 0 and ranks.is_first:
            contact_sheet(clips[:12], sheet)
        with ThreadPoolExecutor(READERS) as readers:
            seen = list(readers.map(read_attributes, clips))
        _log_score(log, setting, ranks.gather((mine, seen)))
        longest = max(longest, clock.seconds() - began)


def contact_sheet(clips: Sequence[Frames], path: Path) -> None:
    """Five frames of each clip in a row, two clips beside each other, as PNG."""
    rows = [
        np.concatenate([clip[i] for i in np.linspace(0, len(clip) - 1, 5).astype(int)], axis=1)
        for clip in clips
    ]
    half = (len(rows) + 1) // 2
    rows += [np.zeros_like(rows[0])] * (2 * half - len(rows))
    columns = [np.concatenate(part, axis=0) for part in (rows[:half], rows[half:])]
    Image.fromarray(np.concatenate(columns, axis=1)).save(path)


def _log_score(
    log: RunLog, setting: Setting, shares: Sequence[tuple[Sequence[ClipSpec], Sequence[ReadBack]]]
) -> None:
    specs = [spec for part, _ in shares for spec in part]
    seen = [read_back for _, part in shares for read_back in part]
    scores = {name: round(value, 4) for name, value in asdict(score_read_backs(specs, seen)).items()}
    log.write("score", **asdict(setting), scores=scores)
