"""How APIs write answers: errors, events, and chats in another form than OpenAI's."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, Self

from pydantic import ValidationError
from starlette.responses import JSONResponse

from astraflow.core.errors import AstraflowError, Reason
from astraflow.raas.agents.completion import AgentCompletion, Asked, Choice, TextPiece
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


def event(data: Mapping[str, Any], name: str = "") -> bytes:
    """Write an event; a name for the APIs that have names."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {compact(data)}\n\n".encode()


def compact(value: Any) -> str:
    """Return JSON without white space."""
    return json.dumps(value, separators=(",", ":"))


Body = dict[str, Any]


class ApiFormat(ABC, Generic[Asked]):
    """One request of an API: writes what it comes to, whole or as a stream of events.

    Attributes:
        path: Below the base URL.
    """

    path: ClassVar[str]

    def __init__(self, completion: AgentCompletion[Asked]) -> None:
        self.completion = completion
        self.request = completion.request

    @staticmethod
    def read(body: Body) -> Body:
        """Return a request of the API as one of OpenAI's."""
        return body

    @staticmethod
    @abstractmethod
    def complete(session: AgentSession, body: Body) -> AgentCompletion[Asked]:
        """Return the completion of what was read.

        Raises:
            AstraflowError: INVALID_FIELD, or POLICY_UNKNOWN for the model.
        """

    @classmethod
    def of(cls, session: AgentSession, body: Body) -> Self:
        """Take up what was read; raises as `complete`."""
        return cls(cls.complete(session, body))

    @staticmethod
    def error_body(error: AstraflowError) -> Body:
        """Write an error as a whole answer."""
        return body_of(error)

    @abstractmethod
    def body(self, choices: Sequence[Choice]) -> Body:
        """Write whole answers."""

    def begin(self) -> bytes:
        """Write what comes before anything was sampled."""
        return b""

    @abstractmethod
    def show(self, piece: TextPiece) -> bytes:
        """Write some text."""

    @abstractmethod
    def close(self, choice: Choice) -> bytes:
        """Write the end of a choice; its text was shown."""

    def end(self) -> bytes:
        """Write what comes after all choices."""
        return b""

    @abstractmethod
    def fail(self, error: AstraflowError) -> bytes:
        """Write that there is no more because of an error."""


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


def counts_of(completion: AgentCompletion[Any], choice: Choice) -> Body:
    """Return how many tokens were read and sampled."""
    sampled = len(choice.turn.generation.tokens)
    return {"input_tokens": len(completion.prompt), "output_tokens": sampled}
