"""A process that is rank 0 of several, for tests: it runs the jobs that it reads and says how they ended.

    python -m tests.pipelines.rank_driver RANKS [ARMED]

Knows: ``load_on_ranks`` and ``run_job``. Does not know: what is expected. Ranks other than 0 fail inside a
step once the file ARMED holds their number. Lines of JSON go both ways.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from configs.job import (
    JobCancelledError,
    JobFailedError,
    JobFinished,
    JobParameters,
    JobPaths,
    StepFinished,
)
from configs.model_preset import find_model
from pipelines import LoadedPipeline, run_job
from pipelines.ranks import load_on_ranks

MODEL = "reelwright-shapes"
ARMED = "REELWRIGHT_TEST_ARMED"


def prepare() -> None:
    """In each follower: one thread, and calls that fail when they are told to."""
    torch.set_num_threads(1)
    armed = os.environ.get(ARMED)
    if armed is None:
        return
    from attention.parallel.shards import Shards

    by_heads = Shards.by_heads

    def failing(self: Shards, *args: Any) -> torch.Tensor:
        path = Path(armed)
        if path.exists() and path.read_text(encoding="utf-8") == str(self.ranks.rank):
            raise RuntimeError("armed")
        return by_heads(self, *args)

    Shards.by_heads = failing  # type: ignore[method-assign, assignment]


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def run(loaded: LoadedPipeline, job: dict[str, Any]) -> None:
    """Each step is said; a job is cancelled when so many are done."""
    params = JobParameters.model_validate(job["params"])
    paths = JobPaths(Path(job["video"]), checkpoint=Path(job["checkpoint"]))
    done = 0

    def is_cancelled() -> bool:
        return job["cancel_after"] is not None and done >= job["cancel_after"]

    try:
        for event in run_job(loaded, params, paths, is_cancelled=is_cancelled):
            if isinstance(event, StepFinished):
                done = event.step
                say(step=done)
            if isinstance(event, JobFinished):
                say(result=event.result.model_dump(mode="json"))
    except JobCancelledError:
        say(cancelled=done)
    except JobFailedError as error:
        say(failed=error.message, code=error.code, broken=loaded.ranks.broken if loaded.ranks else None)


def main(ranks: int) -> None:
    torch.set_num_threads(1)
    loaded = load_on_ranks(
        find_model(MODEL),
        ranks=ranks,
        device="cpu",
        dtype="float32",
        on_broken=lambda reason: say(on_broken=reason),
        prepare=prepare,
        timeout_seconds=120,
    )
    say(pids=loaded.ranks.pids if loaded.ranks else [])
    for line in sys.stdin:
        run(loaded, json.loads(line))


if __name__ == "__main__":
    if len(sys.argv) > 2:
        os.environ[ARMED] = sys.argv[2]
    main(int(sys.argv[1]))
