"""How APIs write answers: errors, events, and chats in another form than OpenAI's."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from pydantic import ValidationError
from starlette.responses import JSONResponse

from astraflow.core.errors import AstraflowError, Reason
from astraflow.raas.agents.completion import AgentCompletion, Choice, TextPiece
from astraflow.raas.agents.request import SamplingRequest
from astraflow.workflows.agents.session import AgentSession

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


class StreamWriter(Protocol):
    """Writes one answer, or some at once; each method returns whole events."""

    def begin(self) -> bytes:
        """Write what comes before anything was sampled."""
        ...

    def show(self, piece: TextPiece) -> bytes:
        """Write some text."""
        ...

    def close(self, choice: Choice) -> bytes:
        """Write the end of a choice; its text was shown."""
        ...

    def end(self) -> bytes:
        """Write what comes after all choices."""
        ...

    def fail(self, error: AstraflowError) -> bytes:
        """Write that there is no more because of an error."""
        ...


def event(data: Mapping[str, Any], name: str = "") -> bytes:
    """Write an event; a name for the APIs that have names."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {compact(data)}\n\n".encode()


def compact(value: Any) -> str:
    """Return JSON without white space."""
    return json.dumps(value, separators=(",", ":"))


Body = dict[str, Any]

Asked = TypeVar("Asked", bound=SamplingRequest)


def _as_it_is(body: Body) -> Body:
    return body


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiFormat(Generic[Asked]):
    """One API.

    Attributes:
        path: Below the base URL.
        request: What is asked for.
        read: Turns a body into that of the request.
        complete: Returns the completion of a request.
        body: Writes whole answers.
        writer: Writes a stream.
        error: Writes an error.
    """

    path: str
    request: type[Asked]
    read: Callable[[Body], Body] = _as_it_is
    complete: Callable[[AgentSession, Asked], AgentCompletion]
    body: Callable[[AgentCompletion, Asked, Sequence[Choice]], Body]
    writer: Callable[[AgentCompletion, Asked], StreamWriter]
    error: Callable[[AstraflowError], Body] = body_of


def renamed(body: Mapping[str, Any], names: Mapping[str, str]) -> Body:
    """Return the fields of a body that mean the same in a chat, under their names there."""
    return {chat: body[own] for own, chat in names.items() if body.get(own) is not None}


def parts_of(content: Any) -> list[Any]:
    """Return a content as a list of parts."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content or [])


def call_of(call_id: Any, name: Any, arguments: Any) -> Body:
    """Return a tool call as a chat has it."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def response_format(given: Body) -> Body:
    """Return a format as a chat has it: there a schema stands one level deeper."""
    if given["type"] != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": given}


def counts_of(completion: AgentCompletion, choice: Choice) -> Body:
    """Return how many tokens were read and sampled."""
    sampled = len(choice.turn.generation.tokens)
    return {"input_tokens": len(completion.prompt), "output_tokens": sampled}
