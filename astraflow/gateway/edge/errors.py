"""Errors in this edge's convention: a status and `{"error": ...}`."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
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
WriteError: TypeAlias = Callable[[Request, int, dict[str, Any]], Awaitable[Response]]

# Of a sentence on what is wrong: a body may have a million wrong fields.
_TOLD_COUNT: Final = 2000
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


def json_answer(fields: Any, status: int = 200) -> Response:
    """Return an answer that is JSON whatever the caller accepts, as published."""
    # Escaped: a text of a request may be none of Unicode.
    return Response(json.dumps(fields), status, media_type="application/json")


async def write_json(_: Request, status: int, fields: dict[str, Any]) -> Response:
    """Answer as most endpoints do."""
    return json_answer(fields, status)


def faults_of(errors: Sequence[Mapping[str, Any]]) -> str:
    """Return what is wrong with fields, by their names, as pydantic tells it."""
    told = [f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in errors]
    return "; ".join(told)[:_TOLD_COUNT]


def add_errors(app: FastAPI, write: WriteError = write_json) -> None:
    """Answer every error of an app.

    Args:
        app: Whose.
        write: Makes the answer of a status and its fields.
    """

    async def refused(request: Request, error: Exception) -> Response:
        status, fields = _told(error)
        answer = await write(request, status, fields)
        if isinstance(error, HTTPException) and error.headers:
            answer.headers.update(error.headers)
        return answer

    for kind in (
        RefusedError,
        AstraflowError,
        HTTPException,
        RequestValidationError,
        MemoryError,
        Exception,
    ):
        app.add_exception_handler(kind, refused)


def _told(error: Exception) -> tuple[int, dict[str, Any]]:
    if isinstance(error, RefusedError):
        return error.status, {"error": error.message}
    if isinstance(error, AstraflowError):
        return status_of(error.reason), {"error": error.message, "reason": str(error.reason)}
    if isinstance(error, HTTPException):
        return error.status_code, {"error": error.detail}
    if isinstance(error, RequestValidationError):
        return 422, {"error": faults_of(error.errors())}
    if isinstance(error, MemoryError):
        return 503, {"error": "the gateway has no memory for this", "reason": "MEMORY_EXCEEDED"}
    return 500, {"error": "the gateway failed; its log says why"}
