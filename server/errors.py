"""Errors as clients see them: one envelope for every body that is not 2xx.

Knows: HTTP statuses, error types and codes. Does not know: which route raised what.
"""

from collections.abc import Mapping

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from server import logs
from server.methods import allowed_methods
from server.schemas import AnyQuery
from server.validation import Problem, problem_of


class ErrorDetail(BaseModel):
    """What went wrong. ``param`` is the request field at fault, as in ``attention.block_size``."""

    message: str
    type: str
    param: str | None = None
    code: str


class ErrorBody(BaseModel):
    """The body of every answer that is not 2xx."""

    error: ErrorDetail


class ApiError(Exception):
    """Raised anywhere in a request to answer it with an error."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.headers = headers

    @classmethod
    def invalid(cls, problem: Problem) -> "ApiError":
        """400 for a request that does not hold together."""
        return cls(400, problem.code, problem.message, param=problem.param)

    @classmethod
    def video_not_found(cls, video_id: str) -> "ApiError":
        """404 for an id that is no job's."""
        return cls(404, "not_found", f"there is no video {video_id[:64]!r}", param="video_id")

    def response(self) -> JSONResponse:
        """The answer."""
        detail = ErrorDetail(
            message=self.message, type=_type_of(self.status), param=self.param, code=self.code
        )
        return JSONResponse(ErrorBody(error=detail).model_dump(), self.status, self.headers)


_FRAMEWORK_CODES = {
    400: "bad_request",
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
}


async def answer_api_error(request: Request, error: Exception) -> JSONResponse:
    """Exception handler of ApiError."""
    assert isinstance(error, ApiError)
    return error.response()


async def answer_framework_error(request: Request, error: Exception) -> JSONResponse:
    """Exception handler of Starlette's own errors: no such path, wrong method."""
    assert isinstance(error, HTTPException)
    message = {
        404: f"there is nothing at {request.url.path[:200]!r}",
        405: f"{request.method} is not allowed at {request.url.path[:200]!r}",
    }.get(error.status_code, str(error.detail))
    code = _FRAMEWORK_CODES.get(error.status_code, "error")
    headers = dict(error.headers or {})
    if error.status_code == 405:  # the framework names the methods of one route, and a path may have several
        headers["Allow"] = allowed_methods(request.app.routes, request.scope)
    return ApiError(error.status_code, code, message, headers=headers).response()


async def answer_database_error(request: Request, error: Exception) -> JSONResponse:
    """Exception handler of a job database that cannot be used now: a full disk, or locked for long."""
    logs.get_logger().error("database_error", message=str(error))
    message = f"the job database cannot be used now: {error}"
    return ApiError(503, "database_unavailable", message, headers={"Retry-After": "10"}).response()


async def answer_storage_error(request: Request, error: Exception) -> JSONResponse:
    """Exception handler of an object store that cannot be used now."""
    logs.get_logger().error("storage_error", message=str(error))
    message = "the store of the video files cannot be used now"  # its own words may name bucket and host
    return ApiError(503, "storage_unavailable", message, headers={"Retry-After": "10"}).response()


async def answer_query_error(request: Request, error: Exception) -> JSONResponse:
    """Exception handler of FastAPI's validation of query parameters."""
    assert isinstance(error, RequestValidationError)
    entries = [{**entry, "loc": entry["loc"][1:]} for entry in error.errors()]
    return ApiError.invalid(problem_of(entries, AnyQuery)).response()


def _type_of(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 403:
        return "permission_error"
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"
