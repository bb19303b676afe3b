"""Dialects: other APIs whose requests are chats, and whose answers are written another way."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from astraflow.core.errors import AstraflowError
from astraflow.raas.agents.completion import Choice, Completion
from astraflow.raas.agents.errors import body_of
from astraflow.raas.agents.request import ChatRequest
from astraflow.raas.agents.script import Script

Body = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One API.

    Attributes:
        path: Below the base URL.
        chat: Turns a body into that of a chat.
        body: Writes a whole answer.
        script: Writes a stream.
        error: Writes an error.
    """

    path: str
    chat: Callable[[Body], Body]
    body: Callable[[Completion, ChatRequest, Choice], Body]
    script: Callable[[Completion, ChatRequest], Script]
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


def counts_of(completion: Completion, choice: Choice) -> Body:
    """Return how many tokens were read and sampled."""
    sampled = len(choice.turn.generation.tokens)
    return {"input_tokens": len(completion.prompt), "output_tokens": sampled}
