"""Jobs over workers that are killed at random, with each kind of store; benchmarks.cluster_soak has 1,000."""

from pathlib import Path

import pytest

from benchmarks.cluster_soak import Report, run_over_folder, run_over_s3
from tests.postgres import PostgresServer

pytestmark = pytest.mark.alone


def check(report: Report, kills: int) -> None:
    """All jobs ended once, with their files, though something was killed."""
    assert report.is_good, report
    assert 0 < sum(report.kills.values()) <= kills
    assert report.endings["completed"] > 0


def test_every_job_ends_once_with_one_file(postgres: PostgresServer, tmp_path: Path) -> None:
    check(run_over_folder(tmp_path, postgres.create_empty(), jobs=150, workers=4, kills=10), 10)


def test_also_when_every_third_request_to_the_store_fails(postgres: PostgresServer, tmp_path: Path) -> None:
    report = run_over_s3(tmp_path, postgres.create_empty(), jobs=24, workers=2, kills=3)
    check(report, 3)
    assert report.failed_store_requests > 10
