"""schemathesis over the server's own OpenAPI document: a bounded number of requests for each operation.

``python -m tests.robustness.schema --examples 1000`` runs longer.
"""

from pathlib import Path

from tests.robustness.schema import run

EXAMPLES = 15


def test_every_operation_answers_as_documented(tmp_path: Path, model_file: Path) -> None:
    report = run(tmp_path / "schema", model_file, examples=EXAMPLES)
    assert report.faults == []
    assert sorted(report.requests) == report.operations
    assert {"POST /v1/videos", "GET /v1/videos/{video_id}/content"} <= set(report.operations)
    assert {"application/json", "multipart/form-data"} <= set(report.media_types)
