"""Messages of a chat: brought into one form, so that what comes back is known again."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from astraflow.core.errors import AstraflowError, Reason

Message = Mapping[str, Any]

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


def normal_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as chat templates read them: contents are texts, arguments are objects.

    Raises:
        AstraflowError: INVALID_FIELD for an unknown role, or content that is not text.
    """
    if not messages:
        raise _invalid("messages", "is empty; a chat begins with at least one message")
    return [_normal(message, f"messages[{index}]") for index, message in enumerate(messages)]


def conversation_keys(start: bytes, messages: Sequence[Message]) -> Iterator[bytes]:
    """Yield a digest of each beginning of a conversation, 16 bytes each, one per message.

    Args:
        start: What the whole conversation depends on, such as its tools.
        messages: Normal ones; white space around what an assistant said makes no difference,
            nor do the ids of tool calls.
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
    return "".join(_part(part, where) for part in cast("list[Any]", content))


def _part(part: Any, where: str) -> str:
    if isinstance(part, Mapping):
        text = cast("Mapping[str, Any]", part).get("text")
        if isinstance(text, str):
            return text
    raise _invalid(where, "has a part that is not text; only text is served")


def _normal(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _invalid(where, "is no object")
    given = cast("Message", message)
    role = given.get("role")
    if role not in _ROLES:
        raise _invalid(f"{where}.role", f"is {role!r}, none of {', '.join(sorted(_ROLES))}")
    made: dict[str, Any] = {"role": "system" if role == "developer" else role}
    made["content"] = text_of(given.get("content"), f"{where}.content")
    made |= {key: given[key] for key in ("name", "tool_call_id") if given.get(key)}
    if given.get("tool_calls"):
        made["tool_calls"] = [_call(call, f"{where}.tool_calls") for call in given["tool_calls"]]
    return made


def _call(call: Any, where: str) -> dict[str, Any]:
    match call:
        case {"function": {"name": str(name), **function}}:
            arguments = _arguments(function.get("arguments"))
            made = {"type": "function", "function": {"name": name, "arguments": arguments}}
            return {"id": str(call.get("id", "")), **made}
        case _:
            raise _invalid(where, "has a call without function.name")


def _arguments(arguments: Any) -> Any:
    """Return arguments as an object; a text that is none stays as it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments


def _identity(message: Message) -> Message:
    if message["role"] != "assistant":
        return message
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return {"role": "assistant", "content": message["content"].strip(), "calls": calls}


def _invalid(field: str, problem: str) -> AstraflowError:
    return AstraflowError(Reason.INVALID_FIELD, f"{field} {problem}", metadata={"field": field})
