"""The two ways to run the training: as the bundled model was made, and small enough to try the script."""

from dataclasses import dataclass

from pipelines.bundled.training.evaluate import SETTINGS, Setting
from pipelines.bundled.training.train_transformer import Bucket, TransformerPlan
from pipelines.bundled.training.train_vae import ClipSize, VaePlan


@dataclass(frozen=True, slots=True)
class Plan:
    """Both stages and the evaluation at the end; ``reserve_seconds`` are kept for saving and evaluating."""

    vae: VaePlan
    transformer: TransformerPlan
    settings: tuple[Setting, ...]
    prompts: int
    sample_batch: int
    vae_reserve_seconds: float
    reserve_seconds: float


FULL = Plan(
    vae=VaePlan(),
    transformer=TransformerPlan(),
    settings=SETTINGS,
    prompts=200,
    sample_batch=50,
    vae_reserve_seconds=25,
    reserve_seconds=45,
)
SMALL = Plan(
    vae=VaePlan(
        crop=ClipSize(32, 5, 2),
        crop_from=64,
        whole=(ClipSize(64, 5, 1), ClipSize(64, 9, 1)),
        check=ClipSize(64, 9, 4),
        check_batch=2,
    ),
    transformer=TransformerPlan(
        encode_seconds=2,
        distill_seconds=3,
        batch=4,
        compile=False,
        layers=2,
        gate_seconds=3,
        gate_clips=2,
        buckets=(Bucket(64, 9, 0.7, 2, True), Bucket(64, 5, 0.3, 2, False)),
    ),
    settings=(Setting(2, 1.0, side=64, frames=9), Setting(2, 2.5, sparse=True, side=64, frames=9)),
    prompts=4,
    sample_batch=2,
    vae_reserve_seconds=3,
    reserve_seconds=6,
)
