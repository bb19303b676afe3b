"""Errors in this edge's convention: a status of HTTP and `{"error": ...}`."""

import json
from collections.abc import Awaitable, Callable
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from grpc import StatusCode
from starlette.exceptions import HTTPException

from astraflow.core.errors import AstraflowError, Reason
from astraflow.rpc.errors import STATUS

_BY_REASON: Final = {Reason.MESSAGE_TOO_LARGE: 413, Reason.RUN_ENDED: 410}
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
# Of a sentence on what is wrong: a body may have a million wrong fields.
_TOLD_COUNT: Final = 2000


def json_answer(fields: Any, status: int = 200) -> Response:
    """Return an answer that is JSON whatever the caller accepts, as published."""
    # Escaped: a text of a request may be none of Unicode.
    return Response(json.dumps(fields), status, media_type="application/json")


async def _as_json(_: Request, status: int, fields: dict[str, Any]) -> Response:
    return json_answer(fields, status)


def add_errors(
    app: FastAPI,
    write: Callable[[Request, int, dict[str, Any]], Awaitable[Response]] = _as_json,
) -> None:
    """Answer every error of an app.

    Args:
        app: Whose.
        write: Makes the answer of a status and its fields.
    """

    async def told(request: Request, error: Exception) -> Response:
        answer = await write(request, *_told(error))
        if isinstance(error, HTTPException) and error.headers:
            answer.headers.update(error.headers)
        return answer

    for kind in (AstraflowError, HTTPException, RequestValidationError, MemoryError, Exception):
        app.add_exception_handler(kind, told)


def _told(error: Exception) -> tuple[int, dict[str, Any]]:
    match error:
        case AstraflowError(reason=reason):
            status = _BY_REASON.get(reason) or _BY_STATUS[STATUS[reason]]
            return status, {"error": error.message, "reason": str(reason)}
        case HTTPException():
            return error.status_code, {"error": error.detail}
        case RequestValidationError():
            # By the names of the fields, as pydantic tells it.
            faults = [
                f"{'.'.join(map(str, each['loc'])) or 'body'}: {each['msg']}"
                for each in error.errors()
            ]
            return 422, {"error": "; ".join(faults)[:_TOLD_COUNT]}
        case MemoryError():
            why = "the gateway has no memory for this"
            return 503, {"error": why, "reason": "MEMORY_EXCEEDED"}
        case _:
            return 500, {"error": "the gateway failed; its log says why"}
