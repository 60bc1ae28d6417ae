"""True architectures of published video models: every configuration value and the size, no weights.

Values are those of the models' published Diffusers folders (``config.json`` of each part), as Diffusers'
conversion scripts and class defaults repeat them; what a class has by default is left out. ``parameters`` is
what the configuration makes; a test counts them. ``article-7b`` is no published model: it is a Wan
transformer of 32 layers and 32 heads of 128, with a feed-forward width that makes it 7 billion parameters,
over 24 latent frames of 512x512 pixels.

Knows: numbers. Does not know: torch, or how anything is built. ``shrunk`` makes the same small enough for a
CPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

Config = Mapping[str, object]
Grid = tuple[int, int, int]


@dataclass(frozen=True)
class Component:
    """A part with weights.

    Attributes:
        class_name, config: of Diffusers, or of transformers where there is a ``config_class``.
        parameters: how many the configuration makes.
        tiny: what ``config`` says instead where a small part is wanted.
    """

    class_name: str
    config: Config
    parameters: int
    tiny: Config
    config_class: str | None = None

    def changed(self, values: Config) -> "Component":
        """The part with other values of its configuration."""
        return replace(self, config={**self.config, **values})


@dataclass(frozen=True)
class Scheduler:
    """A sampler of Diffusers."""

    class_name: str
    config: Config


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One model, and the clip that it is published for.

    Attributes:
        preset: the server's preset of it; None: the server does not run it.
        layer_counts: names in the transformer's configuration that say how many layers it has.
        text_tokens: of the text, as the transformer is given them.
        expand_timesteps: the transformer is given a timestep for each token.
        vae_spatial, vae_temporal, patch: pixels and frames of a latent, latents of a token.
        block_size, anchor_stride: of the sparse variants, unless told otherwise; in tokens.
    """

    name: str
    preset: str | None = None
    pipeline_class: str = "WanPipeline"
    transformer: Component
    text_encoder: Component | None = None
    text_encoder_2: Component | None = None
    vae: Component | None = None
    scheduler: Scheduler | None = None
    layer_counts: tuple[str, ...] = ("num_layers",)
    text_tokens: int = 512
    expand_timesteps: bool = False
    vae_spatial: int = 8
    vae_temporal: int = 4
    patch: Grid = (1, 2, 2)
    width: int
    height: int
    num_frames: int
    fps: int
    guidance_scale: float = 5.0
    block_size: int
    anchor_stride: int

    @property
    def latent_grid(self) -> Grid:
        """Latents along (time, height, width)."""
        frames = (self.num_frames - 1) // self.vae_temporal + 1
        return frames, self.height // self.vae_spatial, self.width // self.vae_spatial

    @property
    def grid(self) -> Grid:
        """Tokens along (time, height, width)."""
        frames, rows, columns = (
            side // patch for side, patch in zip(self.latent_grid, self.patch, strict=True)
        )
        return frames, rows, columns

    @property
    def tokens(self) -> int:
        """Tokens of a clip in one forward pass, text aside."""
        frames, rows, columns = self.grid
        return frames * rows * columns

    @property
    def layers(self) -> int:
        """Layers of the transformer."""
        return sum(int(str(self.transformer.config[name])) for name in self.layer_counts)

    @property
    def components(self) -> dict[str, Component]:
        """The parts with weights, by their names in the pipeline."""
        names = ("transformer", "text_encoder", "text_encoder_2", "vae")
        return {name: part for name in names if (part := getattr(self, name)) is not None}

    def with_layers(self, layers: int) -> "Architecture":
        """The same with fewer layers; two kinds of layers keep their proportion.

        Raises:
            ValueError: that many layers cannot be had, or the proportion not be kept.
        """
        if not 0 < layers <= self.layers:
            raise ValueError(f"--layers {layers}: {self.name} has 1 to {self.layers}")
        counts = {name: int(str(self.transformer.config[name])) for name in self.layer_counts}
        fewer = {name: count * layers // self.layers for name, count in counts.items()}
        if sum(fewer.values()) != layers or not all(fewer.values()):
            kinds = " and ".join(f"{count} {name}" for name, count in counts.items())
            raise ValueError(f"--layers {layers} does not keep the proportion of {kinds}")
        return replace(self, transformer=self.transformer.changed(fewer))

    def with_text(self, tokens: int) -> "Architecture":
        """The same for another length of the text."""
        return replace(self, text_tokens=tokens)

    def shrunk(self) -> "Architecture":
        """Every part and the clip as small as the classes allow."""
        parts = {name: part.changed(part.tiny) for name, part in self.components.items()}
        side = 4 * self.vae_spatial * self.patch[1]
        return replace(
            self,
            **parts,  # type: ignore[arg-type]
            text_tokens=8,
            width=side,
            height=side,
            num_frames=2 * self.vae_temporal + 1,
            block_size=16,
            anchor_stride=5,
        )


TINY_TEXT_DIM = 32
TINY_VOCABULARY = 1024


def _wan_transformer(layers: int, heads: int, ffn_dim: int, parameters: int, channels: int = 16) -> Component:
    return Component(
        "WanTransformer3DModel",
        {
            "num_layers": layers,
            "num_attention_heads": heads,
            "attention_head_dim": 128,
            "ffn_dim": ffn_dim,
            "in_channels": channels,
            "out_channels": channels,
        },
        parameters,
        {
            "num_layers": 2,
            "num_attention_heads": 2,
            "attention_head_dim": 32,
            "ffn_dim": 64,
            "freq_dim": 32,
            "text_dim": TINY_TEXT_DIM,
        },
    )


_T5_XXL = {
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}
_TINY_T5 = {
    "vocab_size": TINY_VOCABULARY,
    "d_model": TINY_TEXT_DIM,
    "d_kv": 16,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 2,
}
UMT5_XXL = Component(
    "UMT5EncoderModel", {**_T5_XXL, "vocab_size": 256_384}, 5_680_910_336, _TINY_T5, config_class="UMT5Config"
)
T5_XXL = Component(
    "T5EncoderModel", {**_T5_XXL, "vocab_size": 32_128}, 4_762_310_656, _TINY_T5, config_class="T5Config"
)
LLAMA_3_8B = Component(
    "LlamaModel",
    {
        "vocab_size": 128_320,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
    },
    7_505_186_816,
    {
        "vocab_size": TINY_VOCABULARY,
        "hidden_size": TINY_TEXT_DIM,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    config_class="LlamaConfig",
)
CLIP_L = Component(
    "CLIPTextModel",
    {
        "vocab_size": 49_408,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "projection_dim": 768,
    },
    123_060_480,
    {
        "vocab_size": TINY_VOCABULARY,
        "hidden_size": TINY_TEXT_DIM,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
    config_class="CLIPTextConfig",
)

_TINY_WAN_VAE = {"base_dim": 8, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
WAN_2_1_VAE = Component("AutoencoderKLWan", {}, 126_892_531, _TINY_WAN_VAE)
# fmt: off
_WAN_2_2_MEAN = [
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891,
    0.1570, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
    -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723,
    -0.2839, -0.2083, -0.0520, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
]
_WAN_2_2_STD = [
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901,
    0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
    0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944,
    0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
]
# fmt: on
WAN_2_2_VAE = Component(
    "AutoencoderKLWan",
    {
        "base_dim": 160,
        "decoder_base_dim": 256,
        "z_dim": 48,
        "is_residual": True,
        "in_channels": 12,
        "out_channels": 12,
        "patch_size": 2,
        "scale_factor_spatial": 16,
        "latents_mean": _WAN_2_2_MEAN,
        "latents_std": _WAN_2_2_STD,
    },
    704_688_668,
    {**_TINY_WAN_VAE, "decoder_base_dim": 8},
)


def _wan_scheduler(flow_shift: float) -> Scheduler:
    return Scheduler(
        "UniPCMultistepScheduler",
        {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": flow_shift},
    )


WAN_2_1_1_3B = Architecture(
    name="wan2.1-t2v-1.3b",
    preset="wan2.1-t2v-1.3b",
    transformer=_wan_transformer(30, 12, 8960, 1_418_996_800),
    text_encoder=UMT5_XXL,
    vae=WAN_2_1_VAE,
    scheduler=_wan_scheduler(3.0),
    width=832,
    height=480,
    num_frames=81,
    fps=16,
    block_size=3120,
    anchor_stride=16,
)
WAN_2_1_14B = Architecture(
    name="wan2.1-t2v-14b",
    preset="wan2.1-t2v-14b",
    transformer=_wan_transformer(40, 40, 13_824, 14_288_491_584),
    text_encoder=UMT5_XXL,
    vae=WAN_2_1_VAE,
    scheduler=_wan_scheduler(5.0),
    width=1280,
    height=720,
    num_frames=81,
    fps=16,
    block_size=7200,
    anchor_stride=32,
)
WAN_2_2_5B = Architecture(
    name="wan2.2-ti2v-5b",
    preset="wan2.2-ti2v-5b",
    transformer=_wan_transformer(30, 24, 14_336, 4_999_787_712, channels=48),
    text_encoder=UMT5_XXL,
    vae=WAN_2_2_VAE,
    scheduler=_wan_scheduler(5.0),
    expand_timesteps=True,
    vae_spatial=16,
    width=1280,
    height=704,
    num_frames=121,
    fps=24,
    block_size=1760,
    anchor_stride=17,
)
COGVIDEOX_5B = Architecture(
    name="cogvideox-5b",
    pipeline_class="CogVideoXPipeline",
    transformer=Component(
        "CogVideoXTransformer3DModel",
        {"num_layers": 42, "num_attention_heads": 48, "use_rotary_positional_embeddings": True},
        5_570_283_072,
        {
            "num_layers": 2,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "time_embed_dim": 16,
            "text_embed_dim": TINY_TEXT_DIM,
        },
    ),
    text_encoder=T5_XXL,
    vae=Component(
        "AutoencoderKLCogVideoX",
        {"scaling_factor": 0.7},
        215_583_907,
        {"block_out_channels": [8, 8, 8, 8], "norm_num_groups": 4, "layers_per_block": 1},
    ),
    scheduler=Scheduler(
        "CogVideoXDPMScheduler",
        {
            "beta_start": 0.00085,
            "beta_end": 0.012,
            "beta_schedule": "scaled_linear",
            "prediction_type": "v_prediction",
            "rescale_betas_zero_snr": True,
            "snr_shift_scale": 1.0,
            "timestep_spacing": "trailing",
        },
    ),
    text_tokens=226,
    width=720,
    height=480,
    num_frames=49,
    fps=8,
    guidance_scale=6.0,
    block_size=2700,
    anchor_stride=17,
)
HUNYUAN_VIDEO = Architecture(
    name="hunyuanvideo",
    pipeline_class="HunyuanVideoPipeline",
    transformer=Component(
        "HunyuanVideoTransformer3DModel",
        {"num_layers": 20, "num_single_layers": 40},
        12_821_012_544,
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "num_layers": 1,
            "num_single_layers": 2,
            "num_refiner_layers": 1,
            "mlp_ratio": 1.0,
            "text_embed_dim": TINY_TEXT_DIM,
            "pooled_projection_dim": TINY_TEXT_DIM,
            "rope_axes_dim": (4, 6, 6),
        },
    ),
    text_encoder=LLAMA_3_8B,
    text_encoder_2=CLIP_L,
    vae=Component(
        "AutoencoderKLHunyuanVideo",
        {},
        246_478_803,
        {"block_out_channels": [8, 8, 8, 8], "norm_num_groups": 4, "layers_per_block": 1},
    ),
    scheduler=Scheduler("FlowMatchEulerDiscreteScheduler", {"shift": 7.0}),
    layer_counts=("num_layers", "num_single_layers"),
    text_tokens=256,
    width=1280,
    height=720,
    num_frames=129,
    fps=24,
    guidance_scale=6.0,
    block_size=7200,
    anchor_stride=32,
)
ARTICLE_7B = Architecture(
    name="article-7b",
    transformer=_wan_transformer(32, 32, 10_240, 7_135_023_168),
    vae_temporal=1,
    width=512,
    height=512,
    num_frames=24,
    fps=8,
    block_size=2048,
    anchor_stride=17,
)

ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (WAN_2_1_1_3B, WAN_2_1_14B, WAN_2_2_5B, COGVIDEOX_5B, HUNYUAN_VIDEO, ARTICLE_7B)
}
