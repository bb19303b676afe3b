"""Prompts: what was sampled goes back to the model as the ids that it was, never as text."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from astraflow.core.rollouts import FinishReason
from astraflow.engines.protocol import Generation
from astraflow.workflows.agents.messages import Message, conversation_keys
from astraflow.workflows.agents.template import ChatTemplate
from astraflow.workflows.ports import Tokenizer
from astraflow.workflows.turns import Turn


class Chats:
    """Turns the messages of a chat into tokens.

    A chat that begins with one in which the policy has answered keeps that one's tokens; only
    what was said since is rendered and encoded.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._answered: dict[bytes, Turn] = {}

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[int]:
        """Return the tokens before the next answer.

        Raises:
            AstraflowError: INVALID_FIELD when the template refuses them.
        """
        known = self._known(messages, tools)
        if known is not None:
            said_at, turn = known
            tail = self._template.tail(messages, said_at, tools)
            if tail is not None:
                rest = unended(turn.generation, self._tokenizer.encode(tail))
                return [*turn.tokens.tolist(), *rest]
        text = self._template.render(messages, tools)
        is_bare = not self._template.has_start
        return list(self._tokenizer.encode(text, add_special_tokens=is_bare))

    def cut(self, messages: Sequence[Message], tools: Sequence[Any], said: str) -> list[int] | None:
        """Return the tokens up to the end of an answer that a budget cut; None: it is no such."""
        chat = [*messages, {"role": "assistant", "content": said}]
        *_, key = conversation_keys(_start(tools), chat)
        turn = self._answered.get(key)
        if turn is None or not turn.is_cut:
            return None
        # White space at its end, which the key leaves out, is a part of what it goes on from.
        is_whole = said.endswith(self._tokenizer.decode(turn.generation.tokens.tolist()))
        return turn.tokens.tolist() if is_whole else None

    def keep(
        self, messages: Sequence[Message], tools: Sequence[Any], answer: Message, turn: Turn
    ) -> None:
        """Remember what was answered."""
        if len(turn.generation.tokens):
            *_, key = conversation_keys(_start(tools), [*messages, answer])
            self._answered[key] = turn

    def _known(self, messages: Sequence[Message], tools: Sequence[Any]) -> tuple[int, Turn] | None:
        """Return the last message that was answered here, and the turn in which it was."""
        if not self._answered:
            return None
        keys = list(conversation_keys(_start(tools), messages))
        for index in range(len(messages) - 1, -1, -1):
            turn = self._answered.get(keys[index])
            if turn is not None:
                return index, turn
        return None


class Texts:
    """Turns texts into tokens; one that goes on from an answered one keeps that one's tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # What was said, how long a text that goes on from it is at least, and the turn.
        self._answered: list[tuple[str, int, Turn]] = []

    def prompt(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        known = [
            (said, turn)
            for said, least, turn in self._answered
            if len(text) >= least and text.startswith(said)
        ]
        if not known:
            return list(self._tokenizer.encode(text, add_special_tokens=True))
        said, turn = max(known, key=lambda pair: len(pair[0]))
        rest = text[len(said) :]
        return [*turn.tokens.tolist(), *(self._tokenizer.encode(rest) if rest else ())]

    def keep(self, text: str, turn: Turn) -> None:
        """Remember what was answered to a text, stop strings included."""
        sampled = turn.generation.tokens.tolist()
        if sampled:
            answer = self._tokenizer.decode(sampled)
            # To which the end token alone was said is asked anew by whoever asks the same.
            self._answered.append((text + answer, len(text) + max(1, len(answer)), turn))


def unended(generation: Generation, tail: Sequence[int]) -> Sequence[int]:
    """Return what follows some tokens, without the end token that the policy sampled itself."""
    is_ended = generation.finish_reason is FinishReason.STOP
    if is_ended and tail and tail[0] == int(generation.tokens[-1]):
        return tail[1:]
    return tail


def _start(tools: Sequence[Mapping[str, Any]]) -> bytes:
    text = json.dumps(list(tools), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
