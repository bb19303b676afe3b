"""OpenAI's Responses API: `/v1/responses`."""

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from astraflow.raas.agents.asked import ChatAsked, unserved
from astraflow.raas.agents.dialects import Body, Dialect, Events, call_of, counts_of, renamed
from astraflow.raas.agents.talk import Choice, Talk

_SAME = {
    "model": "model",
    "max_output_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "tool_choice": "tool_choice",
    "stream": "stream",
}


def chat_of(body: Body) -> Body:
    """Return a request as a chat.

    Raises:
        AstraflowError: INVALID_FIELD for what needs a memory of earlier responses.
    """
    for field in ("previous_response_id", "conversation", "background", "prompt"):
        if body.get(field):
            raise unserved(field, "send the whole input")
    given = body.get("input", "")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
    messages = list(_messages(items))
    if body.get("instructions"):
        messages.insert(0, {"role": "system", "content": body["instructions"]})
    tools = [_tool(tool) for tool in body.get("tools") or ()]
    return {**renamed(body, _SAME), "messages": messages, **({"tools": tools} if tools else {})}


def _messages(items: Sequence[Any]) -> Iterator[Body]:
    """Yield messages; tool calls belong to the assistant's message before them."""
    said: Body | None = None
    for item in items:
        match item:
            case {"type": "function_call", "call_id": call_id, "name": name, "arguments": given}:
                call = call_of(call_id, name, given)
                said = said or {"role": "assistant", "content": None}
                said = {**said, "tool_calls": [*said.get("tool_calls", ()), call]}
            case {"type": "function_call_output", "call_id": call_id, "output": output}:
                if said is not None:
                    yield said
                said = None
                yield {"role": "tool", "tool_call_id": call_id, "content": output}
            case {"type": "reasoning"}:
                continue
            case {"role": role, "content": content}:
                if said is not None:
                    yield said
                message = {"role": role, "content": content}
                said = message if role == "assistant" else None
                if said is None:
                    yield message
            case _:
                raise unserved("input", f"an item is none of those that are known: {item!r:.100}")
    if said is not None:
        yield said


def _tool(tool: Body) -> Body:
    if tool.get("type") != "function":
        raise unserved("tools", "only functions are")
    kept = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {key: tool[key] for key in kept if key in tool}}


def response_body(talk: Talk, asked: ChatAsked, choice: Choice) -> Body:
    """Write a whole answer."""
    return _response(asked, f"resp_{secrets.token_hex(12)}", _items(choice), (talk, choice))


async def response_events(talk: Talk, asked: ChatAsked) -> Events:
    """Yield the events of a stream."""
    name, item_id = f"resp_{secrets.token_hex(12)}", f"msg_{secrets.token_hex(12)}"
    number = 0
    place: Body = {"item_id": item_id, "output_index": 0, "content_index": 0}
    empty: Body = {"type": "output_text", "text": "", "annotations": []}

    def event(kind: str, **fields: Any) -> tuple[str, Body]:
        nonlocal number
        number += 1
        return kind, {"type": kind, "sequence_number": number - 1, **fields}

    yield event("response.created", response=_response(asked, name, []))
    message: Body = {"id": item_id, "type": "message", "role": "assistant", "content": []}
    opened = {**message, "status": "in_progress"}
    yield event("response.output_item.added", output_index=0, item=opened)
    yield event("response.content_part.added", **place, part=empty)
    async for one in talk.pieces():
        if not isinstance(one, Choice):
            yield event("response.output_text.delta", **place, delta=one.text, logprobs=[])
            continue
        items = _items(one, item_id)
        text = {**empty, "text": one.text}
        yield event("response.output_text.done", **place, text=one.text, logprobs=[])
        yield event("response.content_part.done", **place, part=text)
        for index, item in enumerate(items):
            if index:
                yield event("response.output_item.added", output_index=index, item=item)
            yield event("response.output_item.done", output_index=index, item=item)
        whole = _response(asked, name, items, (talk, one))
        yield event(f"response.{whole['status']}", response=whole)


def _items(choice: Choice, item_id: str | None = None) -> list[Body]:
    text: Body = {"type": "output_text", "text": choice.text, "annotations": [], "logprobs": []}
    message = {
        "id": item_id or f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [text],
    }
    calls = [
        {
            "id": f"fc_{secrets.token_hex(12)}",
            "type": "function_call",
            "call_id": call["id"],
            "status": "completed",
            **call["function"],
        }
        for call in choice.calls
    ]
    return [message, *calls]


def _response(
    asked: ChatAsked, name: str, items: list[Body], done: tuple[Talk, Choice] | None = None
) -> Body:
    status, usage = "in_progress", None
    if done is not None:
        counts = counts_of(*done)
        usage = {
            **counts,
            "total_tokens": sum(counts.values()),
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        }
        status = "incomplete" if done[1].finish == "length" else "completed"
    return {
        "id": name,
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": None,
        "metadata": {},
        "model": asked.model,
        "output": items,
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": asked.tool_choice or "auto",
        "tools": [],
        "top_p": None,
        "usage": usage,
    }


RESPONSES = Dialect(path="v1/responses", chat=chat_of, body=response_body, events=response_events)
