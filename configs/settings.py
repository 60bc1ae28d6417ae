"""Server settings: each one's name, type, meaning and default.

Knows: which values and combinations are allowed. Does not know what they are used for, or where values come
from (configs/sources.py); docs/environment.md has one row per field here.
"""

import base64
import binascii
import ipaddress
import re
import socket
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, SecretStr, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from configs.attention import (
    AnchorStride,
    AttentionBackend,
    AttentionOverrides,
    AttentionPrecision,
    CountFromZero,
    DenseSteps,
    TileSides,
    TokenCount,
    TokenOrder,
    TopK,
    WindowUnit,
)
from configs.compute import (
    CompileMode,
    ComputeSettings,
    FusedMode,
    GuidanceBatching,
    ModelPrecision,
    StepCache,
    VaeDtype,
)
from configs.memory import MemoryOptions, OffloadChoice
from configs.model_preset import BUNDLED_MODEL

PREFIX = "REELWRIGHT_"
_WEBHOOK_SECRET_BYTES = range(24, 65)
# No user, password or query: settings are shown and logged.
_STORAGE_URL = re.compile(r"(s3|s3a|gs|az|azure|abfs|abfss)://[^/@?#\s]+(/[^?#\s]*)?|file:///[^?#\s]+")
_HOST_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST_NAME = re.compile(rf"(?=.{{1,253}}$)(\*\.)?{_HOST_LABEL}(\.{_HOST_LABEL})*")


class SettingsError(ValueError):
    """Settings that cannot be used; the message names the flag, variable or line of a file at fault."""


class Settings(BaseSettings):
    """What ``reelwright serve`` and ``reelwright generate`` run with."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True, env_ignore_empty=True)

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        default=8000, description="TCP port to listen on; 0 takes a free one."
    )
    data_dir: Path = Field(
        default=Path("data"), description="Folder of the job database and the video files; made when missing."
    )
    storage_url: str | None = Field(
        default=None,
        description="Object store of the finished files: s3://bucket/prefix, gs://..., az://... "
        "Default: the data folder.",
    )
    storage_presigned_seconds: Annotated[int, Field(ge=0, le=604_800)] = Field(
        default=0,
        description="Downloads go to presigned links that are valid so long; 0: the server sends the files.",
    )
    database_url: SecretStr | None = Field(
        default=None,
        description="PostgreSQL database of the jobs: postgresql://user:password@host/name. "
        "Default: an SQLite file in the data folder.",
    )
    local_worker: bool = Field(
        default=True,
        description="Run a worker beside the API. Without: jobs run where `reelwright worker` does; needs "
        "database_url and storage_url. Default: true.",
    )
    model: str = Field(
        default=BUNDLED_MODEL,
        description="Model to load: preset name, preset file, Diffusers folder or hub id (owner/name).",
    )
    device: str = Field(
        default="auto",
        description="auto (a GPU if there is one), cpu, cuda or cuda:<index>.",
    )
    gpus: Annotated[int, Field(ge=1, le=64)] = Field(
        default=1,
        description="GPUs that denoise each clip together, from device on; on a CPU so many processes.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="Number format of the transformer; auto suits the device."
    )
    vae_dtype: VaeDtype = Field(
        default="auto",
        description="Number format of the VAE: auto (float32 on a GPU, else as dtype), float32, float16 or "
        "bfloat16.",
    )
    offload: OffloadChoice = Field(
        default="auto",
        description="Weights that leave a GPU while they are not used: none, encoder, model or group; "
        "auto: as many as the job's memory needs.",
    )
    feed_forward_chunks: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = Field(
        default="auto",
        description="Slices of tokens in which feed-forward layers run; "
        "auto: where the denoise would need most memory of a job's stages.",
    )
    memory_limit_bytes: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Most memory of the device that the worker may take. Default: all of it."
    )
    compile: CompileMode = Field(
        default="auto",
        description="Compile the transformer's blocks: auto (on a GPU, if that works), on (or fail) or off.",
    )
    fused: FusedMode = Field(
        default="auto",
        description="Norms, residuals and rotary embedding of the blocks, and norms and residuals of the "
        "VAE's decoder, in our own kernels: auto (on a GPU, where they are known), on (or fail) or off.",
    )
    precision: ModelPrecision = Field(
        default="full",
        description="Of the transformer's linear layers: full (that of dtype) or fp8 (a GPU that has it).",
    )
    guidance_batching: GuidanceBatching = Field(
        default="auto", description="Both passes of guidance as one batch: auto (short clips), on or off."
    )
    step_cache: StepCache | None = Field(
        default=None,
        description="Reuse between denoise steps: off, first_block or taylor_seer. Default: the model's.",
    )
    attention_backend: AttentionBackend | None = Field(
        default=None,
        description="Self-attention: anchor_local, block_topk, window or dense. Default: the model's.",
    )
    block_size: TokenCount | Literal["auto"] | None = Field(
        default=None,
        description="Tokens per local block of anchor_local or box of block_topk, or auto. "
        "Default: the model's.",
    )
    token_order: TokenOrder | None = Field(
        default=None,
        description="Blocks of anchor_local: raster (runs of tokens) or tile (boxes). Default: the model's.",
    )
    block_unit: WindowUnit | None = Field(
        default=None, description="What block_size counts: tokens or latent frames. Default: the model's."
    )
    tile_thw: Annotated[TileSides | Literal["auto"] | None, NoDecode] = Field(
        default=None,
        description="Sides of a box in tokens, TIMExHEIGHTxWIDTH, such as 3x15x26, or auto. "
        "Default: the model's.",
    )
    anchor_stride: AnchorStride | None = Field(
        default=None, description="Every n-th token is an anchor, or auto, or none. Default: the model's."
    )
    anchor_offset: CountFromZero | None = Field(
        default=None, description="Position of the first anchor. Default: the model's."
    )
    anchor_rotation: bool | None = Field(
        default=None, description="The anchors move on by one token a step. Default: the model's."
    )
    attention_precision: AttentionPrecision | None = Field(
        default=None,
        description="Of anchor_local: full (the format of dtype) or fp8 (a GPU that has it). "
        "Default: the model's.",
    )
    window: CountFromZero | Literal["auto"] | None = Field(
        default=None, description="Units to either side that window sees, or auto. Default: the model's."
    )
    window_unit: WindowUnit | None = Field(
        default=None,
        description="What the window counts: frames (latent ones) or tokens. Default: the model's.",
    )
    global_frames: CountFromZero | None = Field(
        default=None, description="First latent frames that all of window sees. Default: the model's."
    )
    top_k: TopK | None = Field(
        default=None,
        description="Boxes that a box of block_topk keeps; below 1 a share of all. Default: the model's.",
    )
    pooled_rest: bool | None = Field(
        default=None,
        description="Boxes that block_topk does not keep take part as mean keys. Default: the model's.",
    )
    dense_steps: DenseSteps | None = Field(
        default=None,
        description="How many first steps run dense; below 1 a share of all. Default: the model's.",
    )
    min_tokens: CountFromZero | None = Field(
        default=None, description="Clips with fewer tokens than this run dense. Default: the model's."
    )
    api_keys_sha256: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="SHA-256 (hex) of each accepted API key, comma-separated. Empty: no key is asked for.",
    )
    allow_unauthenticated: bool = Field(
        default=False, description="Listen beyond loopback without any API key."
    )
    open_metrics: bool = Field(default=False, description="Serve /metrics without an API key.")
    open_root: bool = Field(default=False, description="Serve / and the API docs without an API key.")
    max_body_bytes: Annotated[int, Field(ge=1024)] = Field(
        default=1024 * 1024, description="Largest request body; a larger one is answered with 413."
    )
    drain_seconds: Annotated[FiniteFloat, Field(ge=0)] = Field(
        default=30.0,
        description="On SIGTERM or Ctrl-C a running job gets this long to finish; then it is queued again.",
    )
    max_queued_jobs: Annotated[int, Field(ge=1)] = Field(
        default=1000, description="Most jobs that may wait; a further one is answered with 429."
    )
    max_jobs_per_key: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Most jobs of one API key that may wait or run. Default: no such limit."
    )
    retention_seconds: Annotated[FiniteFloat, Field(gt=0)] | None = Field(
        default=None,
        description="Record and files of a job go so long after its end. Default: they stay.",
    )
    preview_seconds: Annotated[FiniteFloat, Field(ge=0)] = Field(
        default=1.0, description="Least time between two preview pictures of a running job; 0: no previews."
    )
    worker_timeout_seconds: Annotated[FiniteFloat, Field(ge=5)] = Field(
        default=120.0, description="A worker process that is silent for so long is killed and replaced."
    )
    webhook_secret: SecretStr | None = Field(
        default=None,
        description="Signs webhooks: whsec_ and base64 of 24 to 64 bytes. Without it none is accepted.",
    )
    webhook_hosts: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="Hosts that webhooks may go to, comma-separated; *.example.com takes subdomains. "
        "Empty: any host with a public address.",
    )
    webhook_allow_private: bool = Field(
        default=False, description="Let webhooks go to loopback and private addresses, and by plain HTTP."
    )
    max_upload_bytes: Annotated[int, Field(ge=1024)] = Field(
        default=20 * 1024 * 1024, description="Largest uploaded picture; a larger one is answered with 413."
    )
    max_upload_pixels: Annotated[int, Field(ge=1024)] = Field(
        default=40_000_000, description="Most pixels of an uploaded picture."
    )
    log_prompts: bool = Field(default=False, description="Write prompts into the log lines of their jobs.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe log lines to write (to standard error)."
    )
    log_format: Literal["auto", "json", "console"] = Field(
        default="auto", description="Log lines as JSON or for people; auto: for people on a terminal."
    )

    @field_validator("data_dir")
    @classmethod
    def _home(cls, folder: Path) -> Path:
        try:
            return folder.expanduser()
        except RuntimeError as error:
            raise ValueError(f"{folder}: there is no such user") from error

    @field_validator("storage_url")
    @classmethod
    def _bucket(cls, url: str | None) -> str | None:
        if url is not None and not _STORAGE_URL.fullmatch(url):
            raise ValueError(
                f"{url!r} is not of the form s3://bucket/prefix, gs://bucket/prefix, "
                "az://account/container/prefix or file:///folder; credentials come from variables such as "
                "AWS_ACCESS_KEY_ID"
            )
        return url.rstrip("/") if url is not None else None

    @field_validator("database_url")
    @classmethod
    def _postgresql_url(cls, url: SecretStr | None) -> SecretStr | None:
        if url is None:
            return None
        text = url.get_secret_value()
        if not text.startswith(("postgresql://", "postgres://")):
            raise ValueError(
                "is not of the form postgresql://user:password@host:port/name; without it the jobs are kept "
                "in an SQLite file of the data folder"
            )
        # PostgreSQL's own message about a part that it cannot read would show the part, a password maybe.
        if not re.fullmatch(r"\w+://((%[0-9A-Fa-f]{2}|[^%/@?#\s])*@)?[^@\s]*", text):
            raise ValueError("user and password must be percent-encoded: %25 for %, %40 for @, %2F for /")
        return url

    @field_validator("device")
    @classmethod
    def _device_name(cls, device: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d{1,4})?", device):
            raise ValueError(f"{device!r} is not one of auto, cpu, cuda, cuda:<index>")
        return device

    @field_validator("tile_thw", mode="before")
    @classmethod
    def _sides(cls, value: Any) -> Any:
        if not isinstance(value, str) or value == "auto":
            return value
        if not re.fullmatch(r"[1-9]\d{0,9}(x[1-9]\d{0,9}){2}", value):
            raise ValueError(f"{value!r:.40} is not TIMExHEIGHTxWIDTH in tokens, such as 3x15x26, or auto")
        return tuple(int(side) for side in value.split("x"))

    @field_validator("api_keys_sha256", "webhook_hosts", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return tuple(filter(None, (v.strip() for v in value.split(",")))) if isinstance(value, str) else value

    @field_validator("api_keys_sha256")
    @classmethod
    def _hex_digests(cls, digests: tuple[str, ...]) -> tuple[str, ...]:
        for position, digest in enumerate(digests, start=1):
            if len(digest) != 64 or not set(digest.lower()) <= set("0123456789abcdef"):
                raise ValueError(
                    f"entry {position} is not a SHA-256 in hex (64 digits); make one with: "
                    "printf %s KEY | sha256sum"
                )
        return tuple(digest.lower() for digest in digests)

    @field_validator("webhook_secret")
    @classmethod
    def _standard_webhooks_secret(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is None:
            return None
        prefix, mark, encoded = secret.get_secret_value().partition("whsec_")
        try:
            length = len(base64.b64decode(encoded, validate=True))
        except (binascii.Error, ValueError):
            length = 0
        if prefix or not mark or length not in _WEBHOOK_SECRET_BYTES:
            raise ValueError(
                "is not whsec_ followed by the base64 of 24 to 64 bytes; make one with: "
                'echo "whsec_$(openssl rand -base64 32)"'
            )
        return secret

    @field_validator("webhook_hosts")
    @classmethod
    def _host_names(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            if not _is_host(host.lower()):
                raise ValueError(
                    f"{host!r} is not a host name, an address or *.domain (no scheme, port or path)"
                )
        return tuple(host.lower() for host in hosts)

    @property
    def compute(self) -> ComputeSettings:
        """What these settings say about how transformers are computed."""
        return ComputeSettings(
            compile=self.compile,
            fused=self.fused,
            precision=self.precision,
            guidance_batching=self.guidance_batching,
            vae_dtype=self.vae_dtype,
        )

    @property
    def memory(self) -> MemoryOptions:
        """What these settings say about the device's memory."""
        chunks = None if self.feed_forward_chunks == "auto" else self.feed_forward_chunks
        return MemoryOptions(self.offload, chunks, self.memory_limit_bytes)

    @property
    def attention(self) -> AttentionOverrides:
        """What these settings say about attention, over the model's own defaults."""
        return AttentionOverrides(
            backend=self.attention_backend,
            token_order=self.token_order,
            block_size=self.block_size,
            block_unit=self.block_unit,
            tile_thw=self.tile_thw,
            anchor_stride=self.anchor_stride,
            anchor_offset=self.anchor_offset,
            anchor_rotation=self.anchor_rotation,
            precision=self.attention_precision,
            window=self.window,
            window_unit=self.window_unit,
            global_frames=self.global_frames,
            top_k=self.top_k,
            pooled_rest=self.pooled_rest,
            dense_steps=self.dense_steps,
            min_tokens=self.min_tokens,
        )

    def check_listening(self) -> None:
        """Raise SettingsError if ``host`` can be reached from outside and no API key is asked for."""
        if self.api_keys_sha256 or self.allow_unauthenticated or is_loopback(self.host):
            return
        raise SettingsError(
            f"refusing to listen on {self.host} without an API key: set {PREFIX}API_KEYS_SHA256, "
            "or pass --allow-unauthenticated if something else keeps strangers out"
        )

    def check_workers(self) -> None:
        """Raise SettingsError if jobs would run elsewhere and nothing leads there."""
        if not self.local_worker:
            self.check_shared(f"{PREFIX}LOCAL_WORKER=false")

    def check_shared(self, purpose: str) -> None:
        """Raise SettingsError unless database and files can be reached from several hosts."""
        if self.database_url is None:
            raise SettingsError(
                f"{purpose} needs {PREFIX}DATABASE_URL, a PostgreSQL database: an SQLite file is for one host"
            )
        if self.storage_url is None:
            raise SettingsError(
                f"{purpose} needs {PREFIX}STORAGE_URL, where API and workers find the files: "
                "s3://bucket/prefix, or file:///folder for a folder that every host mounts"
            )


def is_loopback(host: str) -> bool:
    """Whether every address of ``host`` is a loopback address. Raises SettingsError for an unknown host."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise SettingsError(f"--host {host!r} is not an address of this machine: {error}") from error
    return all(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found)


def flag_name(field: str) -> str:
    """The command-line flag of a settings field."""
    return "--" + field.replace("_", "-")


def variable_name(field: str) -> str:
    """The environment variable of a settings field."""
    return PREFIX + field.upper()


def _is_host(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        # A last label of digits alone makes the whole an IPv4 address, and that is a wrong one.
        return _HOST_NAME.fullmatch(host) is not None and not host.rpartition(".")[2].isdecimal()
    return True
