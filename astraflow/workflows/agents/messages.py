"""Messages of a chat: brought into one form, so that what comes back is known again."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from pydantic_core import from_json

from astraflow.core.errors import AstraflowError, Reason

Message = Mapping[str, Any]

_ROLES = ("assistant", "developer", "function", "system", "tool", "user")
# An assistant may call tools and say nothing.
_TELL = ("developer", "system", "user")
# Of parts, which field has their text. One without a type is taken for a text.
_TEXTS = {
    None: "text",
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}


def normal_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as chat templates read them: contents are texts, arguments are objects.

    Raises:
        AstraflowError: INVALID_FIELD for an unknown role, or content that is not text or missing.
    """
    if not messages:
        raise _invalid("messages", "is empty; a chat begins with at least one message")
    return [_normal(message, f"messages[{index}]") for index, message in enumerate(messages)]


def conversation_keys(start: bytes, messages: Sequence[Message]) -> Iterator[bytes]:
    """Yield a digest of each beginning of a conversation, 16 bytes each, one per message.

    Args:
        start: What the whole conversation depends on, such as its tools.
        messages: Normal ones; white space around what an assistant said makes no difference,
            nor do the ids of tool calls, nor how their numbers are written.
    """
    key = start
    for message in messages:
        text = json.dumps(_identity(message), sort_keys=True, ensure_ascii=False)
        key = hashlib.blake2b(key + text.encode(), digest_size=16).digest()
        yield key


def text_of(content: Any, where: str) -> str:
    """Return the text of a content: a text, nothing, or a list of text parts.

    Raises:
        AstraflowError: INVALID_FIELD for images and other parts.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _invalid(where, "is neither text nor a list of text parts")
    parts = enumerate(cast("list[Any]", content))
    return "".join(_part(part, f"{where}[{index}]") for index, part in parts)


def _part(part: Any, where: str) -> str:
    if not isinstance(part, Mapping):
        raise _invalid(where, "is no part of a content, which is an object")
    given = cast("Mapping[str, Any]", part)
    kind = given.get("type")
    if not isinstance(kind, str | None) or kind not in _TEXTS:
        raise _invalid(where, f"is of type {kind!r:.40}; only text is served, leave it out")
    text = given.get(_TEXTS[kind])
    if not isinstance(text, str):
        raise _invalid(f"{where}.{_TEXTS[kind]}", "is no text")
    return text


def _normal(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _invalid(where, "is no object")
    given = cast("Message", message)
    role = given.get("role")
    if role not in _ROLES:
        raise _invalid(f"{where}.role", f"is {role!r:.40}, none of {', '.join(_ROLES)}")
    if given.get("audio"):
        raise _invalid(f"{where}.audio", "is not served; only text is, leave it out")
    if "content" not in given and role in _TELL:
        raise _invalid(f"{where}.content", f"is missing; the keys are {', '.join(map(str, given))}")
    made: dict[str, Any] = {"role": "system" if role == "developer" else role}
    made["content"] = text_of(given.get("content"), f"{where}.content")
    for key in ("name", "tool_call_id"):
        if given.get(key):
            if not isinstance(given[key], str):
                raise _invalid(f"{where}.{key}", "is no text")
            made[key] = given[key]
    calls = given.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise _invalid(f"{where}.tool_calls", "is no list")
        numbered = enumerate(cast("list[Any]", calls))
        made["tool_calls"] = [_call(call, f"{where}.tool_calls[{at}]") for at, call in numbered]
    return made


def _call(call: Any, where: str) -> dict[str, Any]:
    match call:
        case {"function": {"name": str(name), **function}}:
            arguments = _arguments(function.get("arguments"))
            made = {"type": "function", "function": {"name": name, "arguments": arguments}}
            return {"id": str(call.get("id", "")), **made}
        case _:
            raise _invalid(where, "is no call: it lacks function.name")


def _arguments(arguments: Any) -> Any:
    """Return arguments as an object; a text that is none stays as it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return from_json(arguments or "{}", allow_inf_nan=False)
    except ValueError:
        return arguments


def _identity(message: Message) -> Message:
    if message["role"] != "assistant":
        return message
    calls = json.dumps([call["function"] for call in message.get("tool_calls", ())])
    # Numbers as JavaScript has them: its clients bring 1.0 back as 1.
    calls = json.loads(calls, parse_int=float)
    return {"role": "assistant", "content": message["content"].strip(), "calls": calls}


def _invalid(field: str, problem: str) -> AstraflowError:
    return AstraflowError(Reason.INVALID_FIELD, f"{field} {problem}", metadata={"field": field})
