"""Scripts: how an API writes an answer as a stream of events."""

import json
from collections.abc import Mapping
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, Protocol

from astraflow.core.errors import AstraflowError
from astraflow.raas.agents.completion import Choice, Piece
from astraflow.raas.agents.errors import body_of


class Script(Protocol):
    """Writes one answer, or some at once; each method returns whole events."""

    def begin(self) -> bytes:
        """Write what comes before anything was sampled."""
        ...

    def show(self, piece: Piece) -> bytes:
        """Write some text."""
        ...

    def close(self, choice: Choice) -> bytes:
        """Write the end of a choice; its text was shown."""
        ...

    def end(self) -> bytes:
        """Write what comes after all choices."""
        ...

    def fail(self, error: AstraflowError) -> bytes:
        """Write that there is no more because of an error."""
        ...


class Chunks:
    """Writes chunks of OpenAI's own streams, which differ in nothing but their choices.

    A piece of text is the event that there are most of: what stands around it is written once.
    """

    def __init__(self, head: Mapping[str, Any], *, before: str, after: str) -> None:
        """Prepare.

        Args:
            head: Fields of every chunk.
            before: JSON of a choice between its index and a piece of text.
            after: The same, between that and the end of the choice.
        """
        self._start = f'data: {_json(head)[:-1]},"choices":['
        self._before = f'{self._start}{{"index":'
        self._between, self._after = before, f"{after}}}]}}\n\n"

    def piece(self, piece: Piece) -> bytes:
        """Write a piece of text."""
        text = quoted(piece.text)
        return f"{self._before}{piece.index}{self._between}{text}{self._after}".encode()

    def chunk(self, *choices: Mapping[str, Any], **more: Any) -> bytes:
        """Write a chunk with some choices, and more fields."""
        fields = "".join(f",{quoted(name)}:{_json(value)}" for name, value in more.items())
        return f"{self._start}{','.join(map(_json, choices))}]{fields}}}\n\n".encode()

    def end(self) -> bytes:
        """Write the end of the stream."""
        return b"data: [DONE]\n\n"

    def fail(self, error: AstraflowError) -> bytes:
        """Write an error, and the end."""
        return event(body_of(error)) + self.end()


def event(data: Mapping[str, Any], name: str = "") -> bytes:
    """Write an event; a name for the APIs that have names."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {_json(data)}\n\n".encode()


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
