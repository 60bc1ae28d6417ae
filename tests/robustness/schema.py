"""schemathesis: requests made from the OpenAPI document, right ones and wrong ones, against the real server.

    python -m tests.robustness.schema --examples 1000 --json schema.json

Knows: how to generate requests for each operation, and what every answer must hold to. Does not know the
routes.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import hypothesis
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.schemas import APIOperation

from tests.robustness.client import envelope_fault
from tests.robustness.hostile import MAX_QUEUED_JOBS, write_tiny_model
from tests.server.running_server import RunningServer

CALL_SECONDS = 60.0
CHECK_NAMES = ("status_code_conformance", "content_type_conformance", "response_schema_conformance")
FAULT_CHARACTERS = 2000


@dataclass(frozen=True)
class Report:
    """What a run came to. ``faults`` is empty where every answer was as documented."""

    examples: int
    seed: int
    seconds: float
    operations: list[str]
    requests: dict[str, int]
    media_types: dict[str, int]
    statuses: dict[str, int]
    faults: list[str]


class Session:
    """One server, its document, and the counts."""

    def __init__(self, server: RunningServer, examples: int, seed: int) -> None:
        self._server = server
        self._examples = examples
        self._seed = seed
        self._checks = _checks()
        self._known = server.wait_for_job(server.submit(num_inference_steps=1)["id"])["id"]
        self.requests: Counter[str] = Counter()
        self.media_types: Counter[str] = Counter()
        self.statuses: Counter[str] = Counter()
        self.faults: list[str] = []

    def test(self, operation: Any) -> None:
        """Right and wrong requests; and, where a job is only looked at, right ones for a job that exists."""
        for mode in GenerationMode:
            self._explore(operation, operation.as_strategy(mode), mode.value)
        if "{video_id}" in operation.path and operation.method != "delete":
            known = operation.as_strategy(path_parameters={"video_id": self._known})
            self._explore(operation, known, "known job")

    def _explore(self, operation: Any, strategy: Any, name: str) -> None:
        @hypothesis.seed(self._seed)
        @hypothesis.settings(
            max_examples=self._examples,
            database=None,
            deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(case=strategy)
        def explore(case: Any) -> None:
            self._call(operation.label, case)

        try:
            explore()
        except hypothesis.errors.Unsatisfiable:
            return  # there is no wrong request where nothing can be said
        except (Exception, BaseExceptionGroup) as error:
            said = "; ".join(map(str, getattr(error, "exceptions", [error])))
            self.faults.append(f"{operation.label} ({name}): {said}"[:FAULT_CHARACTERS])

    def _call(self, label: str, case: Any) -> None:
        response = case.call(base_url=self._server.url, timeout=CALL_SECONDS)
        self.requests[label] += 1
        self.statuses[str(response.status_code)] += 1
        if isinstance(case.media_type, str):
            self.media_types[case.media_type] += 1
        names = {name.lower(): values[0] for name, values in response.headers.items()}
        fault = envelope_fault(response.status_code, names, response.content, case.method)
        assert fault is None, f"{fault}; {case.as_curl_command()}"
        case.validate_response(response, checks=self._checks)


def run(folder: Path, model_file: Path, examples: int, seed: int = 1) -> Report:
    """Test every operation of a server started in ``folder``."""
    folder.mkdir()
    flags = ("--max-queued-jobs", str(MAX_QUEUED_JOBS), "--preview-seconds", "0")
    with RunningServer(folder / "data", model_file, *flags) as server:
        session = Session(server.wait_until_ready(), examples, seed)
        schema = schemathesis.openapi.from_dict(server.client.get("/openapi.json").json())
        tested = [_readable(found) for found in schema.get_all_operations()]
        began = time.monotonic()
        for operation in tested:
            session.test(operation)
        assert server.client.get("/health/live").status_code == 200
    return Report(
        examples=examples,
        seed=seed,
        seconds=round(time.monotonic() - began, 1),
        operations=sorted(operation.label for operation in tested),
        requests=dict(sorted(session.requests.items())),
        media_types=dict(sorted(session.media_types.items())),
        statuses=dict(sorted(session.statuses.items())),
        faults=session.faults,
    )


def _readable(found: Any) -> APIOperation[Any, Any, Any, Any]:
    operation: APIOperation[Any, Any, Any, Any] = found.ok()  # raises where the document is wrong
    return operation


def _checks() -> list[Any]:
    load_all_checks()
    return [CHECKS.get_one(name) for name in CHECK_NAMES]


def main() -> int:
    """Run by hand; exit code 1 when an answer was not as documented."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--examples", type=int, default=1000, help="for each operation, and each kind of request"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        report = run(folder / "schema", write_tiny_model(folder), options.examples, options.seed)
    text = json.dumps(asdict(report), indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(f"{text}\n", encoding="utf-8")
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
