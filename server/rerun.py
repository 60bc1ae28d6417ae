"""From a manifest back to the parameters of a job, which run as they are.

Knows: what the served model can make. Does not know: HTTP, or whether the file still exists.
"""

from pydantic import ValidationError

from configs.job import JobParameters
from configs.manifest import Manifest
from configs.model_preset import ModelPreset
from configs.resolve import GenerationRequest, RequestError, resolve

FIELD = "manifest.parameters"


def rerun_parameters(manifest: Manifest, preset: ModelPreset) -> JobParameters:
    """The manifest's parameters, checked as those of a new request are.

    Raises:
        RequestError: they are another model's, or the served model cannot run them as they are.
    """
    parameters = manifest.parameters
    if parameters.model != preset.name:
        message = f"the manifest is of model {parameters.model[:80]!r}; served here: {preset.name}"
        raise RequestError(f"{FIELD}.model", message)
    try:
        resolved = resolve(_request_of(parameters), preset, parameters.attention)
    except ValidationError as error:
        entry = error.errors(include_url=False)[0]
        name = f"{FIELD}.{entry['loc'][0]}"
        raise RequestError(name, f"{name}: {str(entry['msg']).removeprefix('Value error, ')}") from error
    except RequestError as error:
        raise RequestError(FIELD, f"{FIELD}: {error}") from error
    resolved = resolved.model_copy(update={"checkpoint_every": parameters.checkpoint_every})
    if resolved != parameters:
        raise RequestError(FIELD, f"{FIELD} leaves something to be decided; a manifest must say all of it")
    return parameters


def _request_of(parameters: JobParameters) -> GenerationRequest:
    return GenerationRequest(
        prompt=parameters.prompt,
        negative_prompt=parameters.negative_prompt,
        size=f"{parameters.width}x{parameters.height}",
        num_frames=parameters.num_frames,
        fps=parameters.fps,
        num_inference_steps=parameters.num_inference_steps,
        guidance_scale=parameters.guidance_scale,
        seed=parameters.seed,
        step_cache=parameters.step_cache,
    )
