"""Errors in this edge's convention: a status and `{"error": ...}`."""

from typing import Final

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from grpc import StatusCode
from starlette.exceptions import HTTPException

from astraflow.core.errors import AstraflowError, Reason
from astraflow.rpc.errors import STATUS

_BY_STATUS: Final = {
    StatusCode.INVALID_ARGUMENT: 422,
    StatusCode.UNAUTHENTICATED: 401,
    StatusCode.PERMISSION_DENIED: 403,
    StatusCode.RESOURCE_EXHAUSTED: 429,
    StatusCode.UNAVAILABLE: 503,
    StatusCode.DEADLINE_EXCEEDED: 504,
    StatusCode.NOT_FOUND: 404,
    StatusCode.ALREADY_EXISTS: 409,
    StatusCode.FAILED_PRECONDITION: 409,
    StatusCode.CANCELLED: 409,
    StatusCode.DATA_LOSS: 502,
    StatusCode.INTERNAL: 500,
    StatusCode.UNIMPLEMENTED: 501,
}
_BY_REASON: Final = {Reason.MESSAGE_TOO_LARGE: 413, Reason.RUN_ENDED: 410}


class RefusedError(Exception):
    """A request that HTTP has a status for.

    Attributes:
        status: Of HTTP.
        message: For people; says what to do.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def status_of(reason: Reason) -> int:
    """Return the HTTP status of a reason."""
    return _BY_REASON.get(reason) or _BY_STATUS[STATUS[reason]]


def add_errors(app: FastAPI) -> None:
    """Answer every error of an app in JSON."""

    async def refused(_: Request, error: Exception) -> JSONResponse:
        if isinstance(error, RefusedError):
            return JSONResponse({"error": error.message}, error.status)
        if isinstance(error, AstraflowError):
            body = {"error": error.message, "reason": error.reason}
            return JSONResponse(body, status_of(error.reason))
        if isinstance(error, HTTPException):
            return JSONResponse({"error": error.detail}, error.status_code, error.headers)
        return JSONResponse({"error": "the gateway failed; its log says why"}, 500)

    for kind in (RefusedError, AstraflowError, HTTPException, Exception):
        app.add_exception_handler(kind, refused)
