"""Detokenizer: sampled tokens become the text that an agent is shown, once that is certain."""

import json
import re
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic_core import from_json

from astraflow.workflows.ports import Tokenizer

CALL = "<tool_call>"
"""Begins a tool call, in the form that most open models are trained on."""
CALL_END = "</tool_call>"
"""Ends it."""

_CALLS = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
# What a decoder shows of a character that is not whole yet.
_BROKEN = "\ufffd"


class Detokenizer:
    """Decodes a generation piece by piece.

    Nothing of a marker (a stop string, the start of a tool call) is shown, nor what could become
    one, nor anything after it.
    """

    def __init__(self, tokenizer: Tokenizer, markers: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._markers = [marker for marker in markers if marker]
        self._tokens: list[int] = []
        self._shown_to = self._read_to = 0
        self._held: str = ""
        self._is_over = False

    def feed(self, tokens: np.ndarray) -> str:
        """Take sampled tokens, i32[n]; return what can be shown now."""
        self._tokens.extend(tokens.tolist())
        return self._show(self._decoded(is_last=False), is_last=False)

    def finish(self, tokens: np.ndarray) -> str:
        """Take all tokens of the generation, i32[n]; return the rest that is to be shown."""
        self._tokens.extend(tokens[len(self._tokens) :].tolist())
        return self._show(self._decoded(is_last=True), is_last=True)

    def _decoded(self, *, is_last: bool) -> str:
        """Return the text of new tokens; some tokens before them say how they are joined."""
        decode = self._tokenizer.decode
        before = decode(self._tokens[self._shown_to : self._read_to])
        text = decode(self._tokens[self._shown_to :])
        if text.endswith(_BROKEN) and not is_last:
            return ""
        self._shown_to, self._read_to = self._read_to, len(self._tokens)
        return text[len(before) :]

    def _show(self, text: str, *, is_last: bool) -> str:
        if self._is_over:
            return ""
        text = self._held + text
        found: list[int] = [at for each in self._markers if (at := text.find(each)) >= 0]
        if found:
            self._is_over, self._held = True, ""
            return text[: min(found)]
        held = 0 if is_last else max((_overlap(text, each) for each in self._markers), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def cut_at(text: str, stops: Sequence[str]) -> str:
    """Return a text up to the first of some stop strings."""
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(ends, default=len(text))]


def split_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Return what is said, and the tool calls in it; a call that is no JSON is left in the text."""
    calls: list[dict[str, Any]] = []
    for written in _CALLS.findall(text):
        call = _call(written.strip())
        if call is None:
            return text, []
        calls.append(call)
    return (text.partition(CALL)[0].rstrip() if calls else text), calls


def opened_call(name: str) -> str:
    """Return how a call of a tool begins, up to its arguments."""
    return f'{CALL}\n{{"name": {json.dumps(name)}, "arguments": '


def forced_calls(name: str, text: str) -> list[dict[str, Any]]:
    """Return the calls in a text that goes on from `opened_call`.

    A first call that is no JSON has for arguments what was said, as it was said.
    """
    _, calls = split_calls(opened_call(name) + text)
    return calls or [_made_call(name, text.partition(CALL_END)[0].strip())]


def _call(written: str) -> dict[str, Any] | None:
    try:
        match from_json(written):
            case {"name": str(name), **rest}:
                arguments = rest.get("arguments", rest.get("parameters", {}))
                text = arguments if isinstance(arguments, str) else json.dumps(arguments)
                return _made_call(name, text)
            case _:
                return None
    except ValueError:
        return None


def _made_call(name: str, arguments: str) -> dict[str, Any]:
    call = {"name": name, "arguments": arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": call}


def _overlap(text: str, marker: str) -> int:
    """Return how much of the start of `marker` a text ends with."""
    sizes = range(min(len(marker) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(marker[:size])), 0)
