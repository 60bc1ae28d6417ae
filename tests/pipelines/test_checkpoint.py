"""The checkpoint file: what it gives back, what it refuses, and what a failed write leaves."""

import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from configs.job import AttentionReport, JobCancelledError, JobParameters
from pipelines import LoadedPipeline
from pipelines.checkpoint import (
    CHUNK_BYTES,
    Checkpoint,
    CheckpointError,
    Identity,
    read_checkpoint,
    weights_sha256,
    write_checkpoint,
)
from pipelines.checkpointing import identity_of
from pipelines.sampler import SamplerState

CPU = torch.device("cpu")
ATTENTION = AttentionReport(
    backend="anchor_local",
    implementation="torch",
    tokens=48,
    density=0.7345678901234567,
    sparse_calls=2,
    dense_calls=2,
    dense_reasons={"dense_steps": 2},
)
TIMESTEPS = torch.tensor([999, 750, 500, 250])
SAMPLER: SamplerState = {
    "sigmas": torch.linspace(1, 0, 5, dtype=torch.float64),
    "outputs": [None, torch.full((1, 4, 3, 2, 2), 0.1, dtype=torch.bfloat16)],
    # Two views of one storage, without dimensions, as the samplers keep them.
    "timestep_list": [TIMESTEPS[0], TIMESTEPS[1]],
    "order": 2,
    "is_flow": True,
    "shift": 0.1 + 0.2,
    "limits": [float("inf"), float("-inf")],
    "kind": "bh2",
    "nothing": None,
}
CHECKPOINT = Checkpoint(2, torch.randn(1, 4, 3, 2, 2), SAMPLER, ATTENTION, ("cut",))


@pytest.fixture(scope="module")
def identity(loaded: LoadedPipeline, params: JobParameters) -> Identity:
    return identity_of(loaded, params)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint.safetensors"


def _write(path: Path, identity: Identity, checkpoint: Checkpoint = CHECKPOINT) -> int:
    return write_checkpoint(checkpoint, identity, path, before_chunk=lambda: None)


def _assert_same(found: object, expected: object) -> None:
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert torch.equal(found, expected)
    elif isinstance(expected, list):
        assert isinstance(found, list)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            _assert_same(one, other)
    else:
        assert (type(found), found) == (type(expected), expected)


def test_what_is_written_is_read(path: Path, identity: Identity) -> None:
    size = _write(path, identity)
    found = read_checkpoint(path, identity, CPU)
    assert found is not None
    assert size == path.stat().st_size
    assert (found.step, found.attention, found.text_warnings) == (2, ATTENTION, ("cut",))
    _assert_same(found.latents, CHECKPOINT.latents)
    assert found.sampler.keys() == SAMPLER.keys()
    for name, value in SAMPLER.items():
        _assert_same(found.sampler[name], value)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_read_checkpoint_does_not_need_its_file(path: Path, identity: Identity) -> None:
    _write(path, identity)
    found = read_checkpoint(path, identity, CPU)
    assert found is not None
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(found.latents, CHECKPOINT.latents)


@given(st.floats(allow_nan=False))
def test_numbers_come_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, identity: Identity, number: float
) -> None:
    path = tmp_path_factory.getbasetemp() / "numbers.safetensors"
    _write(path, identity, replace(CHECKPOINT, sampler={"number": number}))
    found = read_checkpoint(path, identity, CPU)
    assert found is not None
    assert found.sampler == {"number": number}


def test_no_file_is_no_checkpoint(path: Path, identity: Identity) -> None:
    assert read_checkpoint(path, identity, CPU) is None


def test_no_damaged_file_is_used(path: Path, identity: Identity) -> None:
    _write(path, identity)
    good = path.read_bytes()
    choose = random.Random(0)
    # The length of the header and its first bytes, then bytes everywhere.
    places = [*range(64), *choose.sample(range(64, len(good)), 300), len(good) - 1]
    for place in places:
        bad = bytearray(good)
        bad[place] ^= 1 << choose.randrange(8)
        path.write_bytes(bad)
        with pytest.raises(CheckpointError, match="it cannot be read"):
            read_checkpoint(path, identity, CPU)


@pytest.mark.parametrize("kept", [0, 1, 7, 8, 100, 0.5, 0.999])
def test_no_truncated_file_is_used(path: Path, identity: Identity, kept: float) -> None:
    _write(path, identity)
    good = path.read_bytes()
    path.write_bytes(good[: int(kept * len(good)) if isinstance(kept, float) else kept])
    with pytest.raises(CheckpointError, match="it cannot be read"):
        read_checkpoint(path, identity, CPU)


def test_other_files_are_refused(path: Path, identity: Identity) -> None:
    save_file({"latents": torch.zeros(2)}, path)
    with pytest.raises(CheckpointError, match="its checksum is wrong"):
        read_checkpoint(path, identity, CPU)
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointError, match="it cannot be read"):
        read_checkpoint(path, identity, CPU)


def test_another_version_is_refused(path: Path, identity: Identity) -> None:
    _write(path, identity.model_copy(update={"version": 2}))
    with pytest.raises(CheckpointError, match=r"another version wrote it: identity.version"):
        read_checkpoint(path, identity, CPU)


def test_the_checkpoint_of_another_job_is_refused_and_says_what_differs(
    path: Path, identity: Identity
) -> None:
    _write(path, identity)
    parameters = identity.parameters.model_copy(update={"seed": 6, "prompt": "other"})
    environment = identity.environment.model_copy(update={"device": "cuda (A GPU)"})
    other = identity.model_copy(update={"parameters": parameters, "environment": environment})
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path, other, CPU)
    assert str(caught.value) == (
        "it is another job's: environment.device, parameters.prompt, parameters.seed"
    )


def test_weights_are_part_of_the_identity(
    own_pipeline: LoadedPipeline, params: JobParameters, identity: Identity
) -> None:
    assert identity_of(own_pipeline, params) == identity
    own_pipeline.pipe.transformer.proj_out.weight.data.mul_(1.01)
    assert identity_of(own_pipeline, params) != identity


def test_shapes_and_names_of_weights_count() -> None:
    layer = torch.nn.Linear(4, 2, bias=False)
    turned = torch.nn.Linear(2, 4, bias=False)
    turned.weight.data = layer.weight.data.reshape(4, 2)
    nested = torch.nn.Sequential(layer)
    assert len({weights_sha256([network]) for network in (layer, turned, nested)}) == 3


def test_a_cancelled_write_keeps_the_earlier_file(path: Path, identity: Identity) -> None:
    _write(path, identity)
    before, chunks = path.read_bytes(), list[int]()

    def cancel_at_the_second() -> None:
        chunks.append(1)
        if len(chunks) == 2:
            raise JobCancelledError

    large = replace(CHECKPOINT, latents=torch.zeros(2 * CHUNK_BYTES, dtype=torch.uint8))
    with pytest.raises(JobCancelledError):
        write_checkpoint(large, identity, path, before_chunk=cancel_at_the_second)
    assert len(chunks) == 2
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@contextmanager
def _file_size_limit(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_the_disk_refuses_keeps_the_earlier_file(path: Path, identity: Identity) -> None:
    _write(path, identity)
    before = path.read_bytes()
    large = replace(CHECKPOINT, latents=torch.zeros(2 * CHUNK_BYTES, dtype=torch.uint8))
    with _file_size_limit(CHUNK_BYTES + 5), pytest.raises(OSError, match="File too large"):
        _write(path, identity, large)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]
