"""Stage 2: text encoder and transformer, trained together by flow matching on latents that are encoded once.

Time is uniform through the sampler's shift, so that the noisiest steps, where direction is decided, get
weight. A part of the steps runs the sparse attention that the model is served with. The last stretch distils
guidance: the student learns in one pass what the frozen average says in two, so that serving needs only one.
"""

import contextlib
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from torch import Tensor, nn
from transformers import UMT5EncoderModel

from pipelines.bundled.training import sparsity
from pipelines.bundled.training.clips import (
    SENTENCES,
    Latents,
    draw_latents,
    pick_specs,
    sentences,
    token_ids,
)
from pipelines.bundled.training.components import (
    FLOW_SHIFT,
    TEXT_TOKENS,
    make_text_encoder,
    make_tokenizer,
    make_transformer,
)
from pipelines.bundled.training.gate import Gate
from pipelines.bundled.training.optimise import MovingAverage, adamw, set_learning_rate
from pipelines.bundled.training.ranks import Clock, FlatGradients, Phase, Ranks
from pipelines.bundled.training.records import RunLog
from pipelines.bundled.world import trained_specs

WARMUP_STEPS = 200
PROMPT_DROP = 0.1
# The rest of the batch takes any of the sentences that its clip has.
CANONICAL_SHARE = 0.5
LOG_EVERY_STEPS = 100


@dataclass(frozen=True, slots=True)
class Bucket:
    """Clips of one size, and their share of the encoding time and of the training steps."""

    side: int
    frames: int
    share: float
    encode_batch: int
    compiled: bool


@dataclass(frozen=True, slots=True)
class TransformerPlan:
    """Everything that is chosen about a run; seconds are wall-clock."""

    encode_seconds: float = 45
    distill_seconds: float = 90
    batch: int = 48
    learning_rate: float = 1.5e-3
    distill_learning_rate: float = 3e-4
    time_shift: float = FLOW_SHIFT
    guidance: float = 2.0
    sparse_share: float = 0.25
    compile: bool = True
    layers: int = 8
    gate_seconds: float = 60
    gate_clips: int = 96
    buckets: tuple[Bucket, ...] = (
        Bucket(128, 33, 0.76, 64, True),
        Bucket(96, 33, 0.16, 64, False),
        Bucket(64, 17, 0.08, 128, False),
    )


class Denoiser(nn.Module):
    """Text encoder and transformer as one module: noisy latents, times and token ids in, velocity out."""

    def __init__(self, text_encoder: UMT5EncoderModel, transformer: WanTransformer3DModel) -> None:
        super().__init__()
        self.text_encoder = text_encoder
        self.transformer = transformer

    def forward(self, noisy: Tensor, time: Tensor, ids: Tensor) -> Tensor:
        """Velocity [B, C, T, H, W] for latents at ``time`` [B] in (0, 1] (1 = noise) and ids [B, L]."""
        seen = ids.ne(0).long()
        # The pipeline zero-pads the text's states behind its end; so does this.
        states = self.text_encoder(ids, seen).last_hidden_state * seen[..., None]
        velocity: Tensor = self.transformer(
            hidden_states=noisy, timestep=time * 1000, encoder_hidden_states=states, return_dict=False
        )[0]
        return velocity.float()


@dataclass(frozen=True, slots=True)
class Example:
    """One batch: clean latents, noise, times [B], token ids [B, L]."""

    clean: Tensor
    noise: Tensor
    time: Tensor
    ids: Tensor

    @property
    def noisy(self) -> Tensor:
        return torch.lerp(self.clean, self.noise, self.time.view(-1, 1, 1, 1, 1))

    @property
    def velocity(self) -> Tensor:
        return self.noise - self.clean


def new_denoiser(plan: TransformerPlan, seed: int) -> Denoiser:
    torch.manual_seed(seed)
    return Denoiser(make_text_encoder(), make_transformer(plan.layers))


def train_transformer(
    ranks: Ranks,
    clock: Clock,
    log: RunLog,
    *,
    until: float,
    seed: int,
    plan: TransformerPlan,
    vae: AutoencoderKLWan,
    denoiser: Denoiser,
) -> Denoiser:
    """Train ``denoiser`` until ``until`` seconds on the clock and return the averaged weights.

    ``vae`` must carry its latents' statistics; every rank passes the same weights.
    """
    run = _Run(ranks, clock, log, plan, seed, vae.to(ranks.device).eval(), denoiser.to(ranks.device))
    parameters = sum(p.numel() for p in denoiser.parameters())
    log.write("transformer_start", parameters=parameters, ranks=ranks.size)
    average = run.learn(until - plan.distill_seconds)
    if plan.distill_seconds > 0:
        average = run.distil(average, until)
    return average


class _Run:
    """What both phases share: data, compiled blocks, the sparse masks, the random streams."""

    def __init__(
        self,
        ranks: Ranks,
        clock: Clock,
        log: RunLog,
        plan: TransformerPlan,
        seed: int,
        vae: AutoencoderKLWan,
        denoiser: Denoiser,
    ) -> None:
        self.ranks, self.clock, self.log, self.plan = ranks, clock, log, plan
        self.denoiser = denoiser
        self.attention = sparsity.install(denoiser.transformer)
        # The same on every rank: which bucket and which attention a step runs.
        self.shared = random.Random(seed)
        own_seed = seed * 1000 + ranks.rank
        torch.manual_seed(own_seed)
        self.buckets = _encode_buckets(ranks, clock, log, plan, own_seed, vae)
        self.null_ids = token_ids(make_tokenizer(), [""], ranks.device)[0]
        self.masks = [sparsity.anchor_local_mask(bucket.grid, ranks.device) for bucket in self.buckets]
        largest = plan.buckets[0]
        self.gate = Gate(
            vae, side=largest.side, frames=largest.frames, clips=plan.gate_clips, device=ranks.device
        )
        if plan.compile:
            # Three graphs (dense, sparse, without gradients), each shared by all blocks.
            torch._dynamo.config.recompile_limit = 32
            for block in denoiser.transformer.blocks:
                block.compile(dynamic=False)

    def learn(self, until: float) -> Denoiser:
        """Flow matching; returns the average."""
        average = MovingAverage(self.denoiser, 0.999)
        gradients = FlatGradients(self.denoiser.parameters(), self.ranks)
        optimiser = adamw(self.denoiser.parameters(), weight_decay=1e-2, device=self.ranks.device)
        phase = Phase(self.clock, until)
        next_gate = phase.now + self.plan.gate_seconds
        for step in phase:
            set_learning_rate(
                optimiser,
                self.plan.learning_rate,
                step=step,
                warmup_steps=WARMUP_STEPS,
                progress=phase.progress,
            )
            loss = self._step(lambda example: example.velocity)
            self._apply(loss, optimiser, gradients, average)
            if step % LOG_EVERY_STEPS == 0:
                self.log.write("step", step=step, loss=round(float(loss.detach()), 5))
            if phase.now >= next_gate:
                next_gate = phase.now + self.plan.gate_seconds
                self._look(average.module)
        self.log.write("learned", steps=phase.step)
        return average.module

    def distil(self, teacher: Denoiser, until: float) -> Denoiser:
        """Learn the teacher's guided velocity in one pass; returns the new average."""
        self.denoiser.load_state_dict(teacher.state_dict())
        teacher_attention = sparsity.install(teacher.transformer)
        teacher_attention.mask = None
        if self.plan.compile:
            for block in teacher.transformer.blocks:
                block.compile(dynamic=False)
        average = MovingAverage(self.denoiser, 0.995)
        gradients = FlatGradients(self.denoiser.parameters(), self.ranks)
        optimiser = adamw(self.denoiser.parameters(), weight_decay=0.0, device=self.ranks.device)
        phase = Phase(self.clock, until)
        for step in phase:
            set_learning_rate(
                optimiser,
                self.plan.distill_learning_rate,
                step=step,
                warmup_steps=50,
                progress=phase.progress,
            )
            loss = self._step(lambda example: self._guided(teacher, example))
            self._apply(loss, optimiser, gradients, average)
            if step % LOG_EVERY_STEPS == 0:
                self.log.write("distil_step", step=step, loss=round(float(loss.detach()), 5))
        self._look(average.module)
        self.log.write("distilled", steps=phase.step, guidance=self.plan.guidance)
        return average.module

    def _step(self, target_of: Callable[[Example], Tensor]) -> Tensor:
        """Loss of one batch; its size and its attention are the same on every rank."""
        index = self.shared.choices(range(len(self.buckets)), [b.share for b in self.plan.buckets])[0]
        sparse = self.shared.random() < self.plan.sparse_share
        example = self._draw(self.buckets[index])
        with self._compiled_or_not(index), torch.autocast(self.ranks.device.type, torch.bfloat16):
            target = target_of(example)
            self.attention.mask = self.masks[index] if sparse else None
            velocity = self.denoiser(example.noisy, example.time, example.ids)
            self.attention.mask = None
        return F.mse_loss(velocity, target)

    def _apply(
        self,
        loss: Tensor,
        optimiser: torch.optim.Optimizer,
        gradients: FlatGradients,
        average: MovingAverage[Denoiser],
    ) -> None:
        gradients.zero()
        loss.backward()
        gradients.average_and_clip(1.0)
        optimiser.step()
        average.update()

    def _draw(self, bucket: Latents) -> Example:
        batch, device = self.plan.batch, self.ranks.device
        chosen = torch.randint(len(bucket), (batch,), device=device)
        sentence = (torch.rand(batch, device=device) < CANONICAL_SHARE).logical_not()
        sentence = sentence * torch.randint(bucket.token_ids.shape[1], (batch,), device=device)
        dropped = torch.rand(batch, device=device) < PROMPT_DROP
        ids = torch.where(dropped[:, None], self.null_ids, bucket.token_ids[chosen, sentence])
        clean = bucket.latents[chosen].float()
        # One draw in each of B equal parts of [0, 1]: the same distribution with less variance.
        uniform = (torch.randperm(batch, device=device) + torch.rand(batch, device=device)) / batch
        shift = self.plan.time_shift
        time = shift * uniform / (1 + (shift - 1) * uniform)
        return Example(clean, torch.randn_like(clean), time, ids)

    @torch.no_grad()
    def _guided(self, teacher: Denoiser, example: Example) -> Tensor:
        """The teacher's velocity under guidance; its plain one where the prompt is dropped."""
        noisy, time = example.noisy, example.time
        conditional = teacher(noisy, time, example.ids)
        unconditional = teacher(noisy, time, self.null_ids.expand_as(example.ids))
        return torch.lerp(unconditional, conditional, self.plan.guidance)

    def _compiled_or_not(self, index: int) -> AbstractContextManager[None]:
        """Small sizes run as they are: their few steps would not pay for compiling them."""
        if self.plan.compile and not self.plan.buckets[index].compiled:
            eager: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
            return eager
        return contextlib.nullcontext()

    def _look(self, denoiser: nn.Module) -> None:
        """Ask whether held-out prompts matter to the loss; rank 0 does, the others wait at the next step."""
        if self.ranks.is_first:
            right, wrong = self.gate.losses(denoiser)
            self.log.write("gate", right=round(right, 5), wrong_direction=round(wrong, 5))


def _encode_buckets(
    ranks: Ranks, clock: Clock, log: RunLog, plan: TransformerPlan, seed: int, vae: AutoencoderKLWan
) -> list[Latents]:
    """Encode as many clips of each size as the budget allows; every rank its own."""
    tokenizer = make_tokenizer()
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    encoded = []
    for bucket in plan.buckets:
        until = clock.seconds() + plan.encode_seconds * bucket.share
        latents: list[Tensor] = []
        spoken: list[str] = []
        while not latents or clock.seconds() < until:
            specs = pick_specs(trained_specs(), bucket.encode_batch, generator)
            latents.append(
                draw_latents(
                    vae, specs, generator, side=bucket.side, frames=bucket.frames, device=ranks.device
                )
            )
            spoken.extend(sentence for spec in specs for sentence in sentences(spec, rng))
        ids = token_ids(tokenizer, spoken, ranks.device).view(-1, SENTENCES, TEXT_TOKENS)
        encoded.append(Latents(torch.cat(latents), ids))
        log.write("encoded", side=bucket.side, frames=bucket.frames, clips=len(ids))
    return encoded
