"""The training script on a CPU at toy sizes, and the promises that tie it to what is served."""

import json
import subprocess
import tarfile
from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline

from configs.attention import AttentionConfig
from pipelines.bundled.prompts import prompt
from pipelines.bundled.read_back import score
from pipelines.bundled.training import sparsity
from pipelines.bundled.training.__main__ import main
from pipelines.bundled.training.components import TEXT_TOKENS, make_tokenizer
from pipelines.bundled.training.evaluate import Setting, sample
from pipelines.bundled.training.ranks import FlatGradients, Ranks
from pipelines.bundled.training.records import PART_BYTES, pack
from pipelines.bundled.world import all_specs, held_out_specs

CPU = torch.device("cpu")


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
def test_both_stages_end_in_a_folder_that_samples(tmp_path: Path) -> None:
    small = ["--device", "cpu", "--small"]
    main(["vae", str(tmp_path), "--seconds", "6", *small])
    main(["transformer", str(tmp_path), "--seconds", "14", "--vae", str(tmp_path / "vae"), *small])
    events = [
        json.loads(line)["event"] for line in (tmp_path / "transformer-log.jsonl").read_text().splitlines()
    ]
    assert [event for event in events if event in ("learned", "distilled", "saved", "end")] == [
        "learned",
        "distilled",
        "saved",
        "end",
    ]
    join = f"cat {tmp_path}/shapes.tar.* | tar x -C {tmp_path}"
    subprocess.run(join, shell=True, check=True)
    pipeline = WanPipeline.from_pretrained(tmp_path / "shapes", dtype=torch.float32)
    assert type(pipeline.tokenizer).__name__ in ("PreTrainedTokenizerFast", "TokenizersBackend")
    index = json.loads((tmp_path / "shapes" / "model_index.json").read_text())
    assert index["tokenizer"] == ["transformers", "PreTrainedTokenizerFast"]
    assert pipeline.vae.config.latents_std != [1.0] * 16
    assert str(tmp_path) not in (tmp_path / "shapes" / "vae" / "config.json").read_text()
    pipeline.set_progress_bar_config(disable=True)
    specs = held_out_specs()[:2]
    clips = sample(pipeline, specs, Setting(1, 1.0, side=64, frames=5), seed=0, batch=2, device=CPU)
    assert score(specs, clips).clips == 2


def test_sparse_training_is_the_general_default() -> None:
    served = AttentionConfig().resolved((9, 16, 16))
    assert served.backend == "anchor_local"
    assert served.block_size == sparsity.BLOCK_FRAMES * 16 * 16
    assert served.anchor_stride == sparsity.ANCHOR_STRIDE
    assert served.dense_steps == sparsity.DENSE_STEPS_SHARE


def test_mask_is_the_definition() -> None:
    mask = sparsity.anchor_local_mask((3, 2, 5), CPU)[0, 0]
    block, stride = 2 * 2 * 5, sparsity.ANCHOR_STRIDE
    for q in range(30):
        for k in range(30):
            allowed = q // block == k // block or q % stride == 0 or k % stride == 0
            assert bool(mask[q, k]) == allowed


def test_every_canonical_prompt_is_known_words_and_fits() -> None:
    tokenizer = make_tokenizer()
    unknown = tokenizer.convert_tokens_to_ids("<unk>")
    for spec in all_specs():
        ids = tokenizer(prompt(spec)).input_ids
        assert unknown not in ids
        assert len(ids) <= TEXT_TOKENS
    assert tokenizer("a red zebra").input_ids[2] == unknown


def test_flat_gradients_are_the_parameters_gradients() -> None:
    layer = torch.nn.Linear(3, 2)
    gradients = FlatGradients(layer.parameters(), Ranks(0, 1, CPU))
    for _ in range(2):
        gradients.zero()
        layer(torch.ones(1, 3)).sum().backward()
    expected = torch.ones_like(layer.weight)
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, expected)
    gradients.average_and_clip(1.0)
    assert torch.allclose(layer.weight.grad, expected / 8**0.5)


def test_packed_parts_join_to_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "shapes"
    folder.mkdir()
    content = torch.randint(256, (PART_BYTES + 12345,), dtype=torch.uint8).numpy().tobytes()
    (folder / "weights").write_bytes(content)
    parts = pack(folder, tmp_path)
    assert [part.name for part in parts] == ["shapes.tar.00", "shapes.tar.01"]
    assert max(part.stat().st_size for part in parts) <= PART_BYTES
    joined = tmp_path / "joined.tar"
    joined.write_bytes(b"".join(part.read_bytes() for part in parts))
    with tarfile.open(joined) as archive:
        archive.extractall(tmp_path / "out", filter="data")
    assert (tmp_path / "out" / "shapes" / "weights").read_bytes() == content
