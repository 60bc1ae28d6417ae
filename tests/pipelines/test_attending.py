"""A job's attention setting, put into the pipeline."""

import pytest

from configs.attention import AttentionConfig
from configs.job import JobFailedError, JobParameters
from pipelines import LoadedPipeline
from pipelines.attending import attention_report, swapped


def _with(params: JobParameters, setting: AttentionConfig) -> JobParameters:
    return params.model_copy(update={"attention": setting})


def test_the_jobs_values_reach_the_swap(loaded: LoadedPipeline, params: JobParameters) -> None:
    setting = AttentionConfig(block_size=6, anchor_stride=5, anchor_offset=3, min_tokens=0)
    before = [block.attn1.processor for block in loaded.pipe.transformer.blocks]
    with swapped(loaded, _with(params, setting)) as handle:
        report = handle.report()
        assert all(
            block.attn1.processor is not old
            for block, old in zip(loaded.pipe.transformer.blocks, before, strict=True)
        )
    assert (report.backend, report.block_size, report.anchor_stride, report.anchor_offset) == (
        "anchor_local",
        6,
        5,
        3,
    )
    assert [block.attn1.processor for block in loaded.pipe.transformer.blocks] == before


def test_auto_values_are_those_of_the_clip(loaded: LoadedPipeline, params: JobParameters) -> None:
    with swapped(loaded, _with(params, AttentionConfig())) as handle:
        # 4x4 tokens a frame: two frames a block, and the first stride from 16 that is coprime to 16.
        assert (handle.report().block_size, handle.report().anchor_stride) == (32, 17)


def test_a_window_and_its_auto_value(loaded: LoadedPipeline, params: JobParameters) -> None:
    setting = AttentionConfig(backend="window", window=2, window_unit="tokens", global_frames=0)
    with swapped(loaded, _with(params, setting)) as handle:
        report = handle.report()
    assert (report.backend, report.window, report.window_unit, report.global_frames) == (
        "window",
        (2, 2),
        "tokens",
        0,
    )
    with swapped(loaded, _with(params, AttentionConfig(backend="window"))) as handle:
        assert (handle.report().window, handle.report().global_frames) == ((1, 1), 1)
    assert handle.report().block_size is None


def test_tiles_and_rotation_reach_the_swap(loaded: LoadedPipeline, params: JobParameters) -> None:
    setting = AttentionConfig(
        token_order="tile", tile_thw=(2, 2, 3), anchor_stride=5, anchor_offset=3, anchor_rotation=True
    )
    with swapped(loaded, _with(params, setting)) as handle:
        report = attention_report(handle)
    assert (report.token_order, report.tile_thw, report.block_size) == ("tile", (2, 2, 3), None)
    assert (report.anchor_stride, report.anchor_offset, report.anchor_rotation) == (5, 3, True)
    with swapped(loaded, _with(params, AttentionConfig(token_order="tile"))) as handle:
        assert (handle.report().tile_thw, handle.report().anchor_stride) == ((3, 2, 4), 16)
    frames = AttentionConfig(block_size=1, block_unit="frames")
    with swapped(loaded, _with(params, frames)) as handle:
        assert (handle.report().block_size, handle.report().block_unit) == (16, "tokens")


def test_boxes_reach_the_swap(loaded: LoadedPipeline, params: JobParameters) -> None:
    setting = AttentionConfig(
        backend="block_topk", tile_thw=(1, 2, 2), anchor_stride=5, anchor_offset=3, top_k=3, pooled_rest=True
    )
    with swapped(loaded, _with(params, setting)) as handle:
        report = attention_report(handle)
    assert (report.backend, report.tile_thw, report.block_size) == ("block_topk", (1, 2, 2), None)
    assert (report.anchor_stride, report.anchor_offset) == (5, 3)
    assert (report.top_k, report.pooled_rest) == (3, True)
    runs = AttentionConfig(backend="block_topk", block_size=6, top_k=0.3)
    with swapped(loaded, _with(params, runs)) as handle:
        report = attention_report(handle)
    assert (report.block_size, report.tile_thw, report.anchor_stride, report.top_k) == (6, None, None, 0.3)


def test_dense_leaves_out_the_pattern(loaded: LoadedPipeline, params: JobParameters) -> None:
    with swapped(loaded, _with(params, AttentionConfig(backend="dense"))) as handle:
        assert (handle.report().backend, handle.report().block_size) == ("dense", None)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (AttentionConfig(precision="fp8"), "attention: precision='fp8' needs a GPU, got device cpu"),
        (AttentionConfig(dense_layers=(0, 7)), r"attention: dense_layers names \[7\].* layers 0 .. 1"),
        (AttentionConfig(anchor_offset=40), "attention: .*anchor_offset=40 must be below anchor_stride=17"),
    ],
)
def test_a_setting_that_this_model_cannot_run(
    loaded: LoadedPipeline, params: JobParameters, setting: AttentionConfig, said: str
) -> None:
    with pytest.raises(JobFailedError, match=said) as caught:
        swapped(loaded, _with(params, setting))
    assert caught.value.code == "invalid_input"
