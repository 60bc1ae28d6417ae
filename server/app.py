"""The FastAPI application.

Knows: which routers, layers and error handlers there are, and what starts and ends with the process.
Does not know: what any of them does. Nothing here imports torch.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException

from server.auth import AuthMiddleware
from server.body_limit import BodyLimitMiddleware
from server.database import DatabaseUnavailableError
from server.errors import (
    ApiError,
    ErrorBody,
    answer_api_error,
    answer_database_error,
    answer_framework_error,
    answer_query_error,
    answer_storage_error,
)
from server.methods import HeadMiddleware
from server.request_context import RequestContextMiddleware
from server.routes import content, estimate, events, health, manifest, models, root, stats, videos
from server.services import Services
from server.storage.store import StorageError
from server.submission_body import UPLOAD_PATHS, submission_schemas
from server.version import package_version

ROUTERS = (root, health, videos, estimate, events, content, manifest, models, stats)


def create_app(services: Services) -> FastAPI:
    """The application around ``services``; its lifespan starts and ends the supervisor."""
    app = FastAPI(
        title="Reelwright",
        version=package_version(),
        redoc_url=None,
        redirect_slashes=False,
        lifespan=_lifespan,
        responses={"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}},
    )
    app.state.services = services
    for module in ROUTERS:
        app.include_router(module.router)
    app.add_exception_handler(ApiError, answer_api_error)
    app.add_exception_handler(HTTPException, answer_framework_error)
    app.add_exception_handler(DatabaseUnavailableError, answer_database_error)
    app.add_exception_handler(StorageError, answer_storage_error)
    app.add_exception_handler(RequestValidationError, answer_query_error)
    # The last one added is the outermost.
    app.add_middleware(HeadMiddleware, routes=app.routes)
    app.add_middleware(
        BodyLimitMiddleware,
        max_bytes=services.settings.max_body_bytes,
        max_upload_bytes=services.settings.max_upload_bytes,
        upload_paths=UPLOAD_PATHS,
    )
    app.add_middleware(AuthMiddleware, settings=services.settings)
    app.add_middleware(RequestContextMiddleware, metrics=services.http_metrics)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    services: Services = app.state.services
    services.feed.start()
    services.supervisor.start()
    if services.deliveries is not None:
        services.deliveries.start()
    yield
    services.feed.close()
    if services.deliveries is not None:
        await services.deliveries.close()
    services.supervisor.stop_now()


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        # The route that reads this body itself (two content types) does not tell FastAPI about it.
        document["components"]["schemas"] |= submission_schemas()
        app.openapi_schema = document
    return app.openapi_schema
