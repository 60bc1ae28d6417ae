"""Which model the settings name, and the attention that requests start from.

Knows: settings and presets. Does not know: how a model is loaded.
"""

from pydantic import ValidationError

from configs.attention import AttentionConfig
from configs.model_preset import ModelPreset, find_model
from configs.ranks import check_ranks_can_share
from configs.resolve import GenerationRequest, RequestError, resolve
from configs.settings import Settings, SettingsError, flag_name


def choose_model(settings: Settings) -> tuple[ModelPreset, AttentionConfig]:
    """The preset, and its attention with the settings' over it.

    Raises:
        SettingsError: no such model, or its attention cannot be combined with that of the settings.
    """
    try:
        preset = find_model(settings.model)
    except ValueError as error:
        raise SettingsError(f"{flag_name('model')}: {error}") from error
    try:
        return _with_step_cache(preset, settings), chosen_attention(settings, preset)
    except ValidationError as error:
        message = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        raise SettingsError(f"attention settings: {message}") from error
    except ValueError as error:
        raise SettingsError(f"attention settings: {error}") from error


def chosen_attention(settings: Settings, preset: ModelPreset) -> AttentionConfig:
    """The preset's attention with the settings' over it; with ``precision`` fp8 in fp8, unless they say.

    Raises:
        ValueError: they cannot be combined.
    """
    attention = settings.attention.over(preset.attention)
    follows = settings.attention_precision is None and attention.backend == "anchor_local"
    if settings.precision == "fp8" and follows:
        return attention.model_copy(update={"precision": "fp8"})
    return attention


def check_gpus(preset: ModelPreset, attention: AttentionConfig, gpus: int) -> None:
    """Raise SettingsError if so many GPUs cannot run what a request gets that leaves all to the defaults."""
    if gpus == 1:
        return
    request = GenerationRequest(prompt="of nothing but defaults", seed=0)
    try:
        check_ranks_can_share(resolve(request, preset, attention), gpus)
    except RequestError as error:
        raise SettingsError(f"{flag_name('gpus')} {gpus}: {error}") from error


def _with_step_cache(preset: ModelPreset, settings: Settings) -> ModelPreset:
    if settings.step_cache is None:
        return preset
    defaults = preset.defaults.model_copy(update={"step_cache": settings.step_cache})
    return preset.model_copy(update={"defaults": defaults})
