"""500 hostile requests; ``python -m tests.robustness.hostile`` sends 10,000."""

from pathlib import Path

from tests.robustness.attacks import KINDS, attack
from tests.robustness.hostile import run

MIB = 1024 * 1024
# Sixteen clients at once, each with an upload of the largest size in memory, and the parsers' copies.
ALLOWED_GROWTH_BYTES = 256 * MIB


def test_attacks_are_the_same_for_the_same_seed() -> None:
    ids = ["video_1"]
    first = [attack(3, number, ids) for number in range(2 * len(KINDS))]
    assert first == [attack(3, number, ids) for number in range(2 * len(KINDS))]
    assert first != [attack(4, number, ids) for number in range(2 * len(KINDS))]


def test_hostile_requests_do_no_harm(tmp_path: Path, model_file: Path) -> None:
    report = run(tmp_path / "watched", model_file, count=500, seed=7)
    assert report.faults == []
    assert report.api_rss_bytes_peak - report.api_rss_bytes_before < ALLOWED_GROWTH_BYTES
    assert sum(report.statuses.values()) == 500
    assert {"400", "404", "431"} <= set(report.statuses)
