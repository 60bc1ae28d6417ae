"""The parts of benchmarks/attention*.py that need no GPU."""

from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch

from benchmarks.attention import Row, table
from benchmarks.attention_accuracy import accuracy_rows, accuracy_table
from benchmarks.attention_candidates import CandidateRow, candidate_table
from benchmarks.attention_cases import FP8_ERROR, Shape, inputs, truth
from benchmarks.attention_first_call import first_call_table, first_calls
from benchmarks.attention_peers import FLEX_ORDERS, flex_call, in_order
from benchmarks.attention_sweep import SWEEPS, SweepRow, panels, sweep_table
from benchmarks.gpu import Timing
from benchmarks.line_plot import svg

SMALL = Shape(150, 1, 32, 40, 7)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("order", FLEX_ORDERS)
def test_flex_attention_has_the_same_mask(order: str) -> None:
    x = inputs(SMALL, DEVICE, torch.float32)
    out = in_order(flex_call(SMALL, x, order, compiled=False)(), x, order)
    assert truth(SMALL, x).error(out) < 1e-5


def test_accuracy_of_both_precisions() -> None:
    rows = accuracy_rows((SMALL,), DEVICE)
    full, fp8 = rows
    # So few rows scatter: one more rounding is allowed here, not at full size.
    assert 0 < full.error <= full.eager_error + torch.finfo(torch.bfloat16).eps
    assert (full.most, fp8.most) == (full.eager_error, FP8_ERROR)
    assert fp8.eager_error < fp8.error
    assert fp8.passes
    wrong = replace(fp8, error=float("nan"))
    assert not wrong.passes
    assert accuracy_table([fp8, wrong]).count("FAILED") == 1


def test_first_calls_of_each_length() -> None:
    calls = first_calls("empty", DEVICE, lengths=(20,), heads=1)
    assert [(call.precision, call.tokens) for call in calls] == [("full", 20), ("fp8", 20)]
    assert first_call_table(calls).count("\n") == 3


def test_tables_name_what_is_missing() -> None:
    timing = Timing(2e-3, 1e-3, 3e-3)
    row = Row(
        shape=SMALL,
        precision="full",
        implementation="gluon",
        density=0.5,
        error=1e-3,
        eager_error=2e-3,
        dense_backend="cudnn",
        dense=timing,
        every_dense={"cudnn": timing, "flash": timing},
        sparse=timing,
        portable=timing,
        flex={"permuted": timing},
        flex_skipped={"raster": "why"},
    )
    assert "| gluon 2.000 ms |" in table([row])
    assert "| - | 1.00 x ours |" in table([row])
    assert "Flex raster: why" in table([row])
    fast = CandidateRow(SMALL, "fast", 1e-3, 1e-3, 1e-3, 1e-3, 0.9)
    bad = CandidateRow(SMALL, "bad", None, None, None, None, None, "wrong: error nan")
    lines = candidate_table([bad, fast]).splitlines()
    assert "fast" in lines[1]
    assert "bad: wrong" in lines[2]


def test_the_sweeps_picture_has_every_point() -> None:
    rows = [
        SweepRow(sweep, value + 1, 0.2, 4e-3, 8e-4, 1e-3 * (value + 1), 7e-4)
        for sweep in SWEEPS
        for value in range(3)
    ]
    drawn = ElementTree.fromstring(svg(panels(rows)))
    lines = drawn.findall(".//{http://www.w3.org/2000/svg}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [3] * 4 * len(SWEEPS)
    assert sweep_table(rows).count("\n") == 1 + len(rows)
