"""How an agent writes a chat in each dialect of the endpoint, and reads what is answered."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True)
class Said:
    """One answer as a client puts it together.

    Attributes:
        text: Shown.
        calls: Of tools: id, name and arguments as text.
        token_ids: As told; None: the dialect does not tell them.
    """

    text: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    token_ids: list[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One message of a conversation, in no dialect yet.

    Attributes:
        role: system, user, assistant or tool.
        text: What it says.
        calls: Of an assistant.
        call_id: Which call a tool answers.
    """

    role: str
    text: str
    calls: tuple[tuple[str, str, str], ...] = ()
    call_id: str = ""


def chat_body(lines: list[Line], asked: dict[str, Any]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for line in lines:
        made: dict[str, Any] = {"role": line.role, "content": line.text}
        if line.calls:
            made["tool_calls"] = [
                {"id": name, "type": "function", "function": {"name": tool, "arguments": given}}
                for name, tool, given in line.calls
            ]
            made["content"] = line.text or None
        if line.role == "tool":
            made["tool_call_id"] = line.call_id
        messages.append(made)
    return {**asked, "messages": messages}


def responses_body(lines: list[Line], asked: dict[str, Any]) -> dict[str, Any]:
    items: list[dict[str, Any]] = []
    for line in lines:
        if line.role == "tool":
            items.append(
                {"type": "function_call_output", "call_id": line.call_id, "output": line.text}
            )
            continue
        kind = "output_text" if line.role == "assistant" else "input_text"
        items.append({"role": line.role, "content": [{"type": kind, "text": line.text}]})
        items += [
            {"type": "function_call", "call_id": name, "name": tool, "arguments": given}
            for name, tool, given in line.calls
        ]
    made = {key: value for key, value in asked.items() if key in _SAME}
    made["max_output_tokens"] = asked["max_tokens"]
    if "tools" in asked:
        made["tools"] = [{"type": "function", **tool["function"]} for tool in asked["tools"]]
    if isinstance(asked.get("tool_choice"), dict):
        made["tool_choice"] = {"type": "function", **asked["tool_choice"]["function"]}
    if "response_format" in asked:
        made["text"] = {
            "format": {"type": "json_schema", **asked["response_format"]["json_schema"]}
        }
    return {**made, "input": items}


def messages_body(lines: list[Line], asked: dict[str, Any]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    made = {key: asked[key] for key in ("model", "stream", "max_tokens")}
    for line in lines:
        if line.role == "system":
            made["system"] = line.text
            continue
        blocks: list[dict[str, Any]] = [{"type": "text", "text": line.text}]
        if line.role == "tool":
            blocks = [{"type": "tool_result", "tool_use_id": line.call_id, "content": line.text}]
        blocks += [
            {"type": "tool_use", "id": name, "name": tool, "input": _input(given)}
            for name, tool, given in line.calls
        ]
        role = "assistant" if line.role == "assistant" else "user"
        if role == "user" and messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += blocks
        else:
            messages.append({"role": role, "content": blocks})
    if "tools" in asked:
        functions = [tool["function"] for tool in asked["tools"]]
        made["tools"] = [
            {
                "name": each["name"],
                "description": each["description"],
                "input_schema": each["parameters"],
            }
            for each in functions
        ]
        match asked.get("tool_choice"):
            case "required":
                made["tool_choice"] = {"type": "any"}
            case {"function": {"name": name}}:
                made["tool_choice"] = {"type": "tool", "name": name}
            case _:
                pass
        if not asked.get("parallel_tool_calls", True):
            choice = made.setdefault("tool_choice", {"type": "auto"})
            choice["disable_parallel_tool_use"] = True
    if "response_format" in asked:
        schema = asked["response_format"]["json_schema"]["schema"]
        made["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
    if "stop" in asked:
        made["stop_sequences"] = asked["stop"]
    return {**made, "messages": messages}


def chat_said(told: list[dict[str, Any]]) -> list[Said]:
    """Return the answers of a chat: one body, or the chunks of a stream."""
    found: dict[int, Said] = {}
    for part in told:
        for choice in part.get("choices", ()):
            said = found.setdefault(choice["index"], Said())
            message = choice.get("message") or choice.get("delta") or {}
            said.text += message.get("content") or choice.get("text") or ""
            said.calls += [
                (call["id"], call["function"]["name"], call["function"]["arguments"])
                for call in message.get("tool_calls") or ()
            ]
            said.token_ids = choice.get("token_ids", said.token_ids)
    return [found[index] for index in sorted(found)]


def responses_said(told: list[dict[str, Any]]) -> list[Said]:
    """Return the answer of Responses; of a stream the words as they were shown."""
    *events, last = told
    items = last.get("response", last)["output"]
    shown = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    whole = [item["content"][0]["text"] for item in items if item["type"] == "message"]
    calls = [item for item in items if item["type"] == "function_call"]
    return [
        Said(
            text="".join(shown if events else whole),
            calls=[(call["call_id"], call["name"], call["arguments"]) for call in calls],
        )
    ]


def messages_said(told: list[dict[str, Any]]) -> list[Said]:
    """Return the answer of Messages: one body, or the events of a stream."""
    blocks: list[dict[str, Any]] = list(told[0].get("content") or ())
    for event in told:
        match event:
            case {"type": "content_block_start", "content_block": block}:
                blocks.append({**block, "written": ""})
            case {"type": "content_block_delta", "delta": {"text": text}}:
                blocks[-1]["text"] += text
            case {"type": "content_block_delta", "delta": {"partial_json": text}}:
                blocks[-1]["written"] += text
            case _:
                pass
    said = Said(text="".join(block.get("text", "") for block in blocks))
    for block in blocks:
        if block["type"] == "tool_use":
            given = block.get("written") or json.dumps(block["input"])
            given = json.loads(given).get("INVALID_JSON", given)
            said.calls.append((block["id"], block["name"], given))
    return [said]


def _input(arguments: str) -> dict[str, Any]:
    """Return arguments as Messages have them, whether they are an object or not."""
    try:
        given = json.loads(arguments)
        json.dumps(given, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        given = None
    return given if isinstance(given, dict) else {"INVALID_JSON": arguments}


_SAME = ("model", "stream", "tool_choice", "parallel_tool_calls")
Write = Callable[[list[Line], dict[str, Any]], dict[str, Any]]
Read = Callable[[list[dict[str, Any]]], list[Said]]
DIALECTS: dict[str, tuple[Write, Read]] = {
    "v1/chat/completions": (chat_body, chat_said),
    "v1/responses": (responses_body, responses_said),
    "v1/messages": (messages_body, messages_said),
}
