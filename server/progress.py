"""How far a job is, as one number.

Knows: what share of a job each stage has, roughly. Does not know: how long anything takes.
"""

from configs.job import STAGES, Stage

# Percent of a job when a stage begins. Denoising dominates; the rest is nominal, and 100 means completed.
_START: dict[Stage, int] = {
    "load": 0,
    "text_encode": 0,
    "denoise": 2,
    "vae_decode": 88,
    "encode_mp4": 96,
    "store": 99,
}


def at_stage(stage: Stage) -> int:
    """Percent done when a stage begins."""
    return _START[stage]


def after_step(step: int, total_steps: int) -> int:
    """Percent done after denoise step ``step`` (from 1)."""
    start, end = _START["denoise"], _START[STAGES[STAGES.index("denoise") + 1]]
    return start + (end - start) * step // total_steps
