"""``/v1/models``: what can be asked for."""

from fastapi import APIRouter

from server.errors import ApiError
from server.schemas import Model, ModelList
from server.services import Services, ServicesParam

router = APIRouter(tags=["models"])


@router.get("/v1/models")
def list_models(services: ServicesParam) -> ModelList:
    """The models that a request may name, with their limits and defaults."""
    return ModelList(data=[_model(services)])


@router.get("/v1/models/{model_id}")
def get_model(model_id: str, services: ServicesParam) -> Model:
    """One model."""
    model = _model(services)
    if model_id != model.id:
        raise ApiError(
            404, "not_found", f"there is no model {model_id[:64]!r}; known: {model.id}", param="model_id"
        )
    return model


def _model(services: Services) -> Model:
    preset, worker = services.preset, services.worker()
    return Model(
        id=preset.name,
        created=int(services.started_at),
        owned_by="reelwright",
        source=preset.source,
        description=preset.description,
        state=worker.state if worker else "starting",
        defaults=preset.defaults,
        limits=preset.limits,
        size_multiple=preset.geometry.side_multiple,
        frames_multiple=preset.geometry.vae_temporal,
        attention=services.attention,
    )
