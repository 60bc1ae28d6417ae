"""Which model the settings name, and the attention that requests start from.

Knows: settings and presets. Does not know: how a model is loaded.
"""

from pydantic import ValidationError

from configs.attention import AttentionConfig
from configs.model_preset import ModelPreset, find_model
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
        return preset, settings.attention.over(preset.attention)
    except ValidationError as error:
        message = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        raise SettingsError(f"attention settings: {message}") from error
    except ValueError as error:
        raise SettingsError(f"attention settings: {error}") from error
