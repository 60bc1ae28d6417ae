"""The first pass of a loaded model, before a job has to wait for it.

Knows: that compiled blocks compile in their first pass, and the model's default clip. Does not know: jobs.
"""

import time

from configs.attention import AttentionConfig
from configs.job import JobEvent, JobFailedError
from configs.resolve import GenerationRequest, resolve
from pipelines.cancel import CancelFlag
from pipelines.compiling import CompileFailedError
from pipelines.failures import is_out_of_memory
from pipelines.loading import LoadedPipeline
from pipelines.making import Making
from pipelines.stages import StageRecorder

STEPS = 1


def warm_up(loaded: LoadedPipeline, attention: AttentionConfig) -> float:
    """Denoise one step of the default clip if blocks are to run compiled; returns the seconds it took.

    Where memory is not enough for that clip, the first job compiles.

    Raises:
        JobFailedError: ``model_load_failed``: the setting is to compile, and that failed.
    """
    start = time.perf_counter()
    if loaded.blocks.are_compiled and loaded.parallel is None:
        try:
            _denoise_default_clip(loaded, attention)
        except CompileFailedError as error:
            raise JobFailedError("model_load_failed", f"model {loaded.preset.name}: {error}") from error
        except JobFailedError as error:
            if error.code != "out_of_memory":
                raise
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
    return time.perf_counter() - start


def _denoise_default_clip(loaded: LoadedPipeline, attention: AttentionConfig) -> None:
    request = GenerationRequest(prompt="warm-up", num_inference_steps=STEPS, seed=0, step_cache="off")
    # No dense step: else the sparse kernel would not run.
    params = resolve(request, loaded.preset, attention.model_copy(update={"dense_steps": 0}))
    stages = StageRecorder(loaded.device, _nobody)
    Making(loaded, params, None, 0.0, CancelFlag(lambda: False), _nobody, stages).warm_up()
    loaded.texts.clear()


def _nobody(event: JobEvent) -> None:
    """Is told of the steps."""
