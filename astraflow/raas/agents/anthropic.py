"""Anthropic's Messages API: `/v1/messages`."""

import json
import secrets
from collections.abc import Iterator, Sequence
from typing import Any, cast

from pydantic_core import from_json

from astraflow.core.errors import AstraflowError
from astraflow.raas.agents.chats import chat_completion
from astraflow.raas.agents.completion import AgentCompletion, Choice, TextPiece
from astraflow.raas.agents.formats import (
    ApiFormat,
    Body,
    call_of,
    counts_of,
    event,
    parts_of,
    renamed,
    response_format,
    status_of,
)
from astraflow.raas.agents.request import ChatRequest, unserved
from astraflow.workflows.agents.messages import text_of

_SAME = {
    "model": "model",
    "max_tokens": "max_tokens",
    "stop_sequences": "stop",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stream": "stream",
}
# As Anthropic's own documentation has it for arguments that are no JSON.
_NO_OBJECT = "INVALID_JSON"
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def chat_of(body: Body) -> Body:
    """Return a request as a chat.

    Raises:
        AstraflowError: INVALID_FIELD for blocks that are neither text nor tools.
    """
    shape: Body = body.get("output_config") or {}
    shape = shape.get("format") or body.get("output_format") or {}
    choice: Body = body.get("tool_choice") or {}
    made = renamed(body, _SAME)
    messages: list[Body] = []
    if body.get("system"):
        messages.append({"role": "system", "content": parts_of(body["system"])})
    for index, message in enumerate(body.get("messages") or ()):
        messages += _messages(message, f"messages[{index}].content")
    tools = [_tool(tool, f"tools[{at}]") for at, tool in enumerate(body.get("tools") or ())]
    made |= {"messages": messages, "tool_choice": _choice(choice)}
    last = messages[-1] if messages else {}
    is_begun = last.get("role") == "assistant" and "tool_calls" not in last
    made |= {"continue_final_message": is_begun}
    made |= {"parallel_tool_calls": not choice.get("disable_parallel_tool_use")}
    made |= {"response_format": response_format(shape)} if shape else {}
    return made | ({"tools": tools} if tools else {})


def _tool(tool: Body, where: str) -> Body:
    if "input_schema" not in tool:
        raise unserved(where, f"it is of type {tool.get('type')!r:.40}, and has no input_schema")
    told = {"name": tool["name"], "description": tool.get("description", "")}
    return {"type": "function", "function": {**told, "parameters": tool["input_schema"]}}


def _choice(given: Body) -> Any:
    """Return which tool is to be called, as a chat says it."""
    match given:
        case {"type": "tool", "name": name}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "any"}:
            return "required"
        case _:
            return given.get("type", "auto")


def _messages(message: Any, where: str) -> Iterator[Body]:
    """Yield what a message is in a chat: results of tools are messages of their own."""
    texts: list[Body] = []
    calls: list[Body] = []
    for index, block in enumerate(parts_of(message.get("content"))):
        place = f"{where}[{index}]"
        match block:
            case {"type": "text", "text": _}:
                texts.append(block)
            case {"type": "tool_use", "id": call_id, "name": name, "input": given}:
                calls.append(call_of(call_id, name, _arguments(given)))
            case {"type": "tool_result", "tool_use_id": call_id, **rest}:
                content = text_of(rest.get("content"), f"{place}.content")
                yield {"role": "tool", "tool_call_id": call_id, "content": content}
            case {"type": "thinking" | "redacted_thinking"}:
                continue
            case _:
                raise unserved(place, f"it is neither text nor of a tool: {block!r:.100}")
    if texts or calls:
        made = {"role": message.get("role"), "content": texts}
        yield made | ({"tool_calls": calls} if calls else {})


class MessagesFormat(ApiFormat[ChatRequest]):
    """Messages; a stream has them block by block."""

    path = "v1/messages"
    read = staticmethod(chat_of)
    complete = staticmethod(chat_completion)

    def __init__(self, completion: AgentCompletion[ChatRequest]) -> None:
        super().__init__(completion)
        self._is_open = False

    @staticmethod
    def error_body(error: AstraflowError) -> Body:
        kind = _ERRORS.get(status_of(error), "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}}

    def body(self, choices: Sequence[Choice]) -> Body:
        (choice,) = choices
        text = [{"type": "text", "text": choice.text}] if choice.text or not choice.calls else []
        return {
            **self._message(),
            "content": [*text, *map(_tool_block, choice.calls)],
            **self._ending(choice),
            "usage": counts_of(self.completion, choice),
        }

    def begin(self) -> bytes:
        """Open the message."""
        usage = {"input_tokens": len(self.completion.prompt), "output_tokens": 0}
        return _event("message_start", message={**self._message(), "usage": usage})

    def show(self, piece: TextPiece) -> bytes:
        """Write some text."""
        delta = {"type": "text_delta", "text": piece.text}
        return self._opened() + _event("content_block_delta", index=0, delta=delta)

    def close(self, choice: Choice) -> bytes:
        """Write tool calls, and why the message ended."""
        told = [] if choice.calls else [self._opened()]
        if self._is_open:
            told.append(_event("content_block_stop", index=0))
        for index, block in enumerate(map(_tool_block, choice.calls), int(self._is_open)):
            written = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            empty: Body = {**block, "input": {}}
            told.append(_event("content_block_start", index=index, content_block=empty))
            told.append(_event("content_block_delta", index=index, delta=written))
            told.append(_event("content_block_stop", index=index))
        usage = counts_of(self.completion, choice)
        told.append(_event("message_delta", delta=self._ending(choice), usage=usage))
        return b"".join(told)

    def end(self) -> bytes:
        """Write the end."""
        return _event("message_stop")

    def _ending(self, choice: Choice) -> Body:
        """Return why the message ended, and with which of the stop sequences, if with one."""
        ending = {"stop_reason": _REASONS[choice.finish], "stop_sequence": None}
        if choice.finish != "stop":
            return ending
        tokens = choice.turn.generation.tokens.tolist()
        cut = self.completion.capture.port.tokenizer.decode(tokens)[len(choice.text) :]
        given = next((each for each in self.request.given_stops if cut.startswith(each)), None)
        return ending if given is None else {"stop_reason": "stop_sequence", "stop_sequence": given}

    def _opened(self) -> bytes:
        """Open the text, once."""
        if self._is_open:
            return b""
        self._is_open = True
        block = {"type": "text", "text": ""}
        return _event("content_block_start", index=0, content_block=block)

    def fail(self, error: AstraflowError) -> bytes:
        return event(self.error_body(error), "error")

    def _message(self) -> Body:
        return {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": self.request.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


def _tool_block(call: Body) -> Body:
    function = call["function"]
    return {
        "type": "tool_use",
        "id": call["id"],
        "name": function["name"],
        "input": _input(function["arguments"]),
    }


def _input(arguments: str) -> Body:
    """Return arguments as the object that an input is; what is none as it was said, under a key."""
    try:
        given = from_json(arguments)
        json.dumps(given, allow_nan=False)
    except ValueError:
        given = None
    return cast("Body", given) if isinstance(given, dict) else {_NO_OBJECT: arguments}


def _arguments(given: Any) -> Any:
    """Return what `_input` was given."""
    match given:
        case {"INVALID_JSON": str(arguments), **rest} if not rest:
            return arguments
        case _:
            return given
