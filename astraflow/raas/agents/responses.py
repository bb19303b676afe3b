"""OpenAI's Responses API: `/v1/responses`."""

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from astraflow.core.errors import AstraflowError, Reason
from astraflow.raas.agents.chats import chat_completion, logprobs_of
from astraflow.raas.agents.completion import AgentCompletion, Choice, TextPiece
from astraflow.raas.agents.formats import (
    ApiFormat,
    Body,
    body_of,
    call_of,
    counts_of,
    event,
    renamed,
    response_format,
)
from astraflow.raas.agents.request import ChatRequest, unserved
from astraflow.workflows.agents.messages import text_of

_SAME = {
    "model": "model",
    "max_output_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "parallel_tool_calls": "parallel_tool_calls",
    "tool_choice": "tool_choice",
    "stream": "stream",
    "top_logprobs": "top_logprobs",
}
_LOGPROBS = "message.output_text.logprobs"
_OF_TOOLS = ("name", "description", "parameters", "strict")
_EMPTY: Mapping[str, Any] = {"type": "output_text", "text": "", "annotations": []}


def chat_of(body: Body) -> Body:
    """Return a request as a chat.

    Raises:
        AstraflowError: INVALID_FIELD for what needs a memory of earlier responses, for contents
            that are no text, and where nothing was said.
    """
    for field in ("previous_response_id", "conversation", "background", "prompt"):
        if body.get(field):
            raise unserved(field, "send the whole input")
    given = body.get("input")
    if given is None:
        why = "input: is missing; send a text, or items"
        raise AstraflowError(Reason.INVALID_FIELD, why, metadata={"field": "input"})
    items = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
    messages = list(_messages(items))
    if body.get("instructions"):
        messages.insert(0, {"role": "system", "content": body["instructions"]})
    made = {**renamed(body, _SAME), "messages": messages}
    made["logprobs"] = bool(made.get("top_logprobs")) or _LOGPROBS in (body.get("include") or ())
    shape: Body = body.get("text") or {}
    if shape.get("format"):
        made["response_format"] = response_format(shape["format"])
    if isinstance(choice := body.get("tool_choice"), dict) and "name" in choice:
        made["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
    if tools := list(_tools(body.get("tools") or (), "tools")):
        made["tools"] = tools
    return made


def _messages(items: Sequence[Any]) -> Iterator[Body]:
    """Yield messages; tool calls belong to the assistant's message before them."""
    said: Body | None = None
    for index, item in enumerate(items):
        where = f"input[{index}]"
        match item:
            case {"type": "function_call", "call_id": call_id, "name": name, "arguments": given}:
                space = item.get("namespace")
                call = call_of(call_id, f"{space}.{name}" if space else name, given)
                said = said or {"role": "assistant", "content": None}
                said = {**said, "tool_calls": [*said.get("tool_calls", ()), call]}
            case {"type": "function_call_output", "call_id": call_id, "output": output}:
                if said is not None:
                    yield said
                said = None
                content = text_of(output, f"{where}.output")
                yield {"role": "tool", "tool_call_id": call_id, "content": content}
            case {"type": "reasoning"}:
                continue
            case {"role": role, "content": content}:
                if said is not None:
                    yield said
                message = {"role": role, "content": text_of(content, f"{where}.content")}
                said = message if role == "assistant" else None
                if said is None:
                    yield message
            case _:
                raise unserved(where, f"it is none of the items that are known: {item!r:.100}")
    if said is not None:
        yield said


def _tools(tools: Iterable[Body], where: str, space: str = "") -> Iterator[Body]:
    """Yield functions; those of a namespace have it before their names, with a dot."""
    for index, tool in enumerate(tools):
        place = f"{where}[{index}]"
        match tool:
            case {"type": "function", "name": str(name)}:
                kept = {key: tool[key] for key in _OF_TOOLS if key in tool}
                yield {"type": "function", "function": {**kept, "name": f"{space}{name}"}}
            case {"type": "namespace", "name": str(name)} if not space:
                yield from _tools(tool["tools"], f"{place}.tools", f"{name}.")
            case _:
                kind = tool.get("type")
                raise unserved(place, f"it is of type {kind!r:.40}, and only functions are")


class ResponsesFormat(ApiFormat[ChatRequest]):
    """Responses; the events of a stream have numbers."""

    path = "v1/responses"
    read = staticmethod(chat_of)
    complete = staticmethod(chat_completion)

    def __init__(self, completion: AgentCompletion[ChatRequest]) -> None:
        super().__init__(completion)
        self._name = f"resp_{secrets.token_hex(12)}"
        self._item_id = f"msg_{secrets.token_hex(12)}"
        self._place: Body = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        self._is_open = False
        self._number = 0

    def body(self, choices: Sequence[Choice]) -> Body:
        (choice,) = choices
        return self._response(self._items(choice), choice)

    def begin(self) -> bytes:
        """Open the response."""
        response = self._response([])
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event(kind, response=response) for kind in kinds)

    def show(self, piece: TextPiece) -> bytes:
        """Write some text."""
        delta = self._event(
            "response.output_text.delta", **self._place, delta=piece.text, logprobs=[]
        )
        return self._opened() + delta

    def close(self, choice: Choice) -> bytes:
        """Write tool calls, and the whole response."""
        items = self._items(choice)
        told: list[bytes] = []
        for index, item in enumerate(items):
            if item["type"] == "message":
                told.append(self._opened())
                told += self._message(item)
            else:
                told += self._call(index, item)
        response = self._response(items, choice)
        told.append(self._event(f"response.{response['status']}", response=response))
        return b"".join(told)

    def _opened(self) -> bytes:
        """Open the message, once."""
        if self._is_open:
            return b""
        self._is_open = True
        head: Body = {"id": self._item_id, "type": "message", "role": "assistant", "content": []}
        item = {**head, "status": "in_progress"}
        added = self._event("response.output_item.added", output_index=0, item=item)
        return added + self._event("response.content_part.added", **self._place, part=_EMPTY)

    def _message(self, item: Body) -> Iterator[bytes]:
        """Yield the events at the end of the message."""
        (part,) = item["content"]
        said = {"text": part["text"], "logprobs": part["logprobs"]}
        yield self._event("response.output_text.done", **self._place, **said)
        yield self._event("response.content_part.done", **self._place, part=part)
        yield self._event("response.output_item.done", output_index=0, item=item)

    def _call(self, index: int, call: Body) -> Iterator[bytes]:
        """Yield the events of a tool call."""
        begun = {**call, "arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=index, item=begun)
        place, written = {"item_id": call["id"], "output_index": index}, call["arguments"]
        yield self._event("response.function_call_arguments.delta", **place, delta=written)
        named = {"name": call["name"], "arguments": written}
        yield self._event("response.function_call_arguments.done", **place, **named)
        yield self._event("response.output_item.done", output_index=index, item=call)

    def fail(self, error: AstraflowError) -> bytes:
        return self._event("error", **body_of(error))

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)

    def _items(self, choice: Choice) -> list[Body]:
        calls = [
            {
                "id": f"fc_{secrets.token_hex(12)}",
                "type": "function_call",
                "call_id": call["id"],
                "status": "completed",
                **call["function"],
                **self._spaced(call["function"]["name"]),
            }
            for call in choice.calls
        ]
        # It has words, or has to have some place for what is told of them.
        if not (self._is_open or choice.text or not calls or self.request.logprobs):
            return calls
        logprobs = logprobs_of(self.completion, choice) if self.request.logprobs else []
        message = {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{**_EMPTY, "text": choice.text, "logprobs": logprobs}],
        }
        return [message, *calls]

    def _spaced(self, name: str) -> Body:
        """Return the namespace and the name of a function that was offered in one."""
        space, dot, inner = name.partition(".")
        is_offered = any(tool["function"]["name"] == name for tool in self.request.tools or ())
        return {"namespace": space, "name": inner} if dot and is_offered else {}

    def _response(self, items: list[Body], done: Choice | None = None) -> Body:
        status, usage = "in_progress", None
        if done is not None:
            counts = counts_of(self.completion, done)
            usage = {
                **counts,
                "total_tokens": sum(counts.values()),
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens_details": {"reasoning_tokens": 0},
            }
            status = "incomplete" if done.finish == "length" else "completed"
        is_cut = status == "incomplete"
        return {
            "id": self._name,
            "object": "response",
            "created_at": int(time.time()),
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": None,
            "metadata": {},
            "model": self.request.model,
            "output": items,
            "parallel_tool_calls": self.request.parallel_tool_calls is not False,
            "temperature": None,
            "tool_choice": self.request.tool_choice or "auto",
            "tools": [],
            "top_p": None,
            "usage": usage,
        }
