"""Errors as clients of OpenAI's API know them."""

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

from astraflow.core.errors import AstraflowError, Reason

# Reason: status, type, code.
_TABLE: Mapping[Reason, tuple[int, str, str]] = {
    Reason.INVALID_FIELD: (400, "invalid_request_error", "invalid_value"),
    Reason.CAPABILITY_MISSING: (400, "invalid_request_error", "unsupported"),
    Reason.CONTEXT_TOO_LONG: (400, "invalid_request_error", "context_length_exceeded"),
    Reason.TOKEN_INVALID: (401, "authentication_error", "invalid_api_key"),
    Reason.POLICY_UNKNOWN: (404, "invalid_request_error", "model_not_found"),
    Reason.TASK_UNKNOWN: (404, "invalid_request_error", "session_not_found"),
    Reason.SOURCE_TIMEOUT: (408, "invalid_request_error", "request_timeout"),
    Reason.TASK_CANCELLED: (410, "invalid_request_error", "session_over"),
    Reason.MESSAGE_TOO_LARGE: (413, "invalid_request_error", "request_too_large"),
    Reason.OVERLOADED: (429, "rate_limit_error", "rate_limit_exceeded"),
    Reason.ENGINE_FAILED: (503, "server_error", "engine_failed"),
    Reason.VERSION_NOT_SERVED: (503, "server_error", "no_weights_yet"),
}
ErrorBody = Callable[[AstraflowError], dict[str, Any]]
_RETRY_AFTER = {"Retry-After": "1"}


def status_of(error: AstraflowError) -> int:
    """Return the status of an error; 500 for one that no client can have caused."""
    return _TABLE.get(error.reason, (500,))[0]


def body_of(error: AstraflowError) -> dict[str, Any]:
    """Return an error as a body."""
    _, kind, code = _TABLE.get(error.reason, (500, "server_error", error.reason.lower()))
    said = {"message": error.message, "type": kind, "code": code}
    return {"error": {**said, "param": error.metadata.get("field")}}


def answer_of(error: AstraflowError, write: ErrorBody = body_of) -> JSONResponse:
    """Return an error as an answer, its body as `write` has it."""
    status = status_of(error)
    headers = _RETRY_AFTER if status in (429, 503) else None
    return JSONResponse(write(error), status, headers)


def invalid_body(error: ValidationError) -> AstraflowError:
    """Return what is wrong with a body, field by field."""
    problems = [
        (".".join(map(str, each["loc"])), each["msg"]) for each in error.errors(include_url=False)
    ]
    text = "; ".join(f"{field}: {message}" for field, message in problems[:5])
    return AstraflowError(Reason.INVALID_FIELD, text, metadata={"field": problems[0][0]})
