"""Anthropic's Messages API: `/v1/messages`."""

import json
import secrets
from collections.abc import Iterator
from typing import Any, cast

from astraflow.core.errors import AstraflowError
from astraflow.raas.agents.asked import ChatAsked, unserved
from astraflow.raas.agents.dialects import (
    Body,
    Dialect,
    Events,
    call_of,
    counts_of,
    parts_of,
    renamed,
)
from astraflow.raas.agents.errors import status_of
from astraflow.raas.agents.talk import Choice, Talk

_SAME = {
    "model": "model",
    "max_tokens": "max_tokens",
    "stop_sequences": "stop",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stream": "stream",
}
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def chat_of(body: Body) -> Body:
    """Return a request as a chat.

    Raises:
        AstraflowError: INVALID_FIELD for blocks that are neither text nor tools.
    """
    choice = cast("Body", body.get("tool_choice") or {}).get("type", "auto")
    made = renamed(body, _SAME)
    messages: list[Body] = []
    if body.get("system"):
        messages.append({"role": "system", "content": parts_of(body["system"])})
    for message in body.get("messages") or ():
        messages += _messages(message)
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description", ""),
                "parameters": tool["input_schema"],
            },
        }
        for tool in body.get("tools") or ()
        if "input_schema" in tool
    ]
    made |= {"messages": messages, "tool_choice": choice}
    return made | ({"tools": tools} if tools else {})


def _messages(message: Any) -> Iterator[Body]:
    """Yield what a message is in a chat: results of tools are messages of their own."""
    texts: list[Body] = []
    calls: list[Body] = []
    for block in parts_of(message.get("content")):
        match block:
            case {"type": "text", "text": _}:
                texts.append(block)
            case {"type": "tool_use", "id": call_id, "name": name, "input": given}:
                calls.append(call_of(call_id, name, given))
            case {"type": "tool_result", "tool_use_id": call_id, **rest}:
                content = parts_of(rest.get("content"))
                yield {"role": "tool", "tool_call_id": call_id, "content": content}
            case {"type": "thinking" | "redacted_thinking"}:
                continue
            case _:
                raise unserved("messages", f"a block is neither text nor of a tool: {block!r:.100}")
    if texts or calls:
        made = {"role": message.get("role"), "content": texts}
        yield made | ({"tool_calls": calls} if calls else {})


def message_body(talk: Talk, asked: ChatAsked, choice: Choice) -> Body:
    """Write a whole answer."""
    return {
        **_message(asked),
        "content": _blocks(choice),
        "stop_reason": _REASONS[choice.finish],
        "usage": counts_of(talk, choice),
    }


async def message_events(talk: Talk, asked: ChatAsked) -> Events:
    """Yield the events of a stream."""

    def event(kind: str, **fields: Any) -> tuple[str, Body]:
        return kind, {"type": kind, **fields}

    usage = {"input_tokens": len(talk.prompt), "output_tokens": 0}
    yield event("message_start", message={**_message(asked), "usage": usage})
    yield event("content_block_start", index=0, content_block={"type": "text", "text": ""})
    async for one in talk.pieces():
        if not isinstance(one, Choice):
            delta: Body = {"type": "text_delta", "text": one.text}
            yield event("content_block_delta", index=0, delta=delta)
            continue
        yield event("content_block_stop", index=0)
        for index, block in enumerate(map(_tool_block, one.calls), 1):
            written = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            yield event("content_block_start", index=index, content_block={**block, "input": {}})
            yield event("content_block_delta", index=index, delta=written)
            yield event("content_block_stop", index=index)
        delta = {"stop_reason": _REASONS[one.finish], "stop_sequence": None}
        yield event("message_delta", delta=delta, usage=counts_of(talk, one))
        yield event("message_stop")


def error_body(error: AstraflowError) -> Body:
    """Write an error."""
    kind = _ERRORS.get(status_of(error), "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def _message(asked: ChatAsked) -> Body:
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": asked.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _blocks(choice: Choice) -> list[Body]:
    text = [{"type": "text", "text": choice.text}] if choice.text or not choice.calls else []
    return [*text, *map(_tool_block, choice.calls)]


def _tool_block(call: Body) -> Body:
    function = call["function"]
    given = json.loads(function["arguments"])
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": given}


MESSAGES = Dialect(
    path="v1/messages",
    chat=chat_of,
    body=message_body,
    events=message_events,
    error=error_body,
)
