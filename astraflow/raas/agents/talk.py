"""A talk: the answers to one request, whole or piece by piece."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from astraflow.core.rollouts import FinishReason
from astraflow.raas.agents.asked import Knobs
from astraflow.raas.agents.speech import CALL, Speech, cut_at, split_calls
from astraflow.workflows.agents.capture import Capture
from astraflow.workflows.agents.session import AgentSession
from astraflow.workflows.agents.turns import Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some text of a choice."""

    index: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A whole answer.

    Attributes:
        index: Which of the answers.
        text: Without stop strings and tool calls.
        calls: Tool calls, as OpenAI writes them.
        finish: stop, length or tool_calls.
        turn: What was sampled.
    """

    index: int
    text: str
    calls: Sequence[dict[str, Any]]
    finish: str
    turn: Turn


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Talk:
    """One request.

    Attributes:
        session: Whose.
        capture: The policy that answers.
        prompt: Token ids.
        knobs: What was asked for.
        has_tools: Whether tool calls are looked for.
        keep: Told of every answer.
    """

    session: AgentSession
    capture: Capture
    prompt: list[int]
    knobs: Knobs
    has_tools: bool
    keep: Callable[[Choice], None]
    overrides: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        """Refuse a prompt that leaves no room for an answer."""
        self.session.require_room(self.capture, len(self.prompt))

    async def choices(self) -> list[Choice]:
        """Return all answers.

        Raises:
            AstraflowError: What `AgentSession.sample` raises.
        """
        return [each async for each in self.pieces(is_watched=False) if isinstance(each, Choice)]

    async def pieces(self, *, is_watched: bool = True) -> AsyncIterator[Piece | Choice]:
        """Yield the answers as they come: the text of each, then the whole.

        Args:
            is_watched: False: only the whole ones.

        Raises:
            AstraflowError: What `AgentSession.sample` raises.
        """
        news: asyncio.Queue[Piece | Choice | Exception] = asyncio.Queue()
        count = self.knobs.count
        tasks = [
            asyncio.create_task(self._answer(index, news, is_watched=is_watched))
            for index in range(count)
        ]
        try:
            while count:
                one = await news.get()
                if isinstance(one, Exception):
                    raise one
                count -= isinstance(one, Choice)
                yield one
        finally:
            for task in tasks:
                task.cancel()

    async def _answer(
        self, index: int, news: "asyncio.Queue[Piece | Choice | Exception]", *, is_watched: bool
    ) -> None:
        markers = (*self.knobs.stops, *((CALL,) if self.has_tools else ()))
        speech = Speech(self.capture.port.tokenizer, markers)

        def show(text: str) -> None:
            if text:
                news.put_nowait(Piece(index=index, text=text))

        def watch(tokens: np.ndarray) -> None:
            show(speech.feed(tokens))

        try:
            turn = await self.session.sample(
                self.capture,
                self.prompt,
                overrides=self.overrides,
                seed=self.knobs.seed,
                watch=watch if is_watched else None,
            )
            if is_watched:
                show(speech.finish(turn.generation.tokens))
            choice = self._choice(index, turn)
            self.keep(choice)
            news.put_nowait(choice)
        except Exception as error:  # noqa: BLE001 - raised again by the one who reads the news
            news.put_nowait(error)

    def _choice(self, index: int, turn: Turn) -> Choice:
        sampled = turn.generation.tokens.tolist()
        text = cut_at(self.capture.port.tokenizer.decode(sampled), self.knobs.stops)
        text, calls = split_calls(text) if self.has_tools else (text, [])
        finish = "length" if turn.generation.finish_reason is FinishReason.LENGTH else "stop"
        return Choice(
            index=index, text=text, calls=calls, finish="tool_calls" if calls else finish, turn=turn
        )
