"""A completion: the answers to one request, whole or piece by piece."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

from astraflow.core.errors import AstraflowError
from astraflow.core.rollouts import FinishReason
from astraflow.raas.agents.detokenizer import CALL, Detokenizer, cut_at, forced_calls, split_calls
from astraflow.raas.agents.request import SamplingRequest
from astraflow.rpc.concurrency import Outbox
from astraflow.workflows.agents.session import AgentSession, Capture
from astraflow.workflows.turns import Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPiece:
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


CompletionItem: TypeAlias = TextPiece | Choice

Asked = TypeVar("Asked", bound=SamplingRequest)


class AgentCompletion(Generic[Asked]):
    """One request.

    Attributes:
        capture: The policy that answers.
        prompt: Token ids.
        request: What was asked for.
    """

    def __init__(
        self,
        session: AgentSession,
        capture: Capture,
        request: Asked,
        *,
        prompt: list[int],
        keep: Callable[[Choice], None],
    ) -> None:
        """Sample nothing yet; `keep` is told of every answer.

        Raises:
            AstraflowError: INVALID_FIELD for what no engine here can do; CONTEXT_TOO_LONG for a
                prompt that leaves no room for an answer.
        """
        self._overrides = request.overrides(
            capture.port.sampling, chooses_sampling=session.chooses_sampling
        )
        session.require_context(capture, len(prompt))
        self.capture = capture
        self.prompt = prompt
        self.request = request
        self._session = session
        self._keep = keep

    def note_failure(self, error: AstraflowError) -> None:
        """Note that it was not begun."""
        self._session.note_failure(self.capture, self.prompt, error)

    async def choices(self) -> list[Choice]:
        """Return all answers.

        Raises:
            AstraflowError: What `AgentSession.sample` raises.
        """
        told = self.stream(Outbox(), is_watched=False)
        return [one async for items in told for one in items if isinstance(one, Choice)]

    async def stream(
        self, queue: Outbox[CompletionItem], *, is_watched: bool = True
    ) -> AsyncGenerator[list[CompletionItem]]:
        """Yield the answers as they come: the text of each, then the whole.

        Args:
            queue: They come through it; an error that it is closed with ends the completion.
            is_watched: False: only the whole ones.

        Raises:
            AstraflowError: What `AgentSession.sample` raises.
        """
        count = self.request.count
        tasks = [
            asyncio.create_task(self._answer(index, queue, is_watched=is_watched))
            for index in range(count)
        ]
        try:
            while count:
                items = await queue.take()
                count -= sum(isinstance(one, Choice) for one in items)
                yield items
        finally:
            for task in tasks:
                task.cancel()

    async def _answer(self, index: int, queue: Outbox[CompletionItem], *, is_watched: bool) -> None:
        is_watched = is_watched and self.request.forced_tool is None
        markers = (*self.request.stops, *((CALL,) if self.request.offered_tools else ()))
        detokenizer = Detokenizer(self.capture.port.tokenizer, markers)
        shown = ""

        def show(text: str) -> None:
            nonlocal shown
            shown += text
            if text:
                queue.put(TextPiece(index=index, text=text))

        def watch(tokens: np.ndarray) -> None:
            show(detokenizer.feed(tokens))

        try:
            turn = await self._session.sample(
                self.capture,
                self.prompt,
                overrides=self._overrides,
                seed=self.request.seed,
                watch=watch if is_watched else None,
            )
            if is_watched:
                show(detokenizer.finish(turn.generation.tokens))
            choice = self._choice(index, turn)
            if is_watched and choice.text.startswith(shown):
                show(choice.text[len(shown) :])  # what began as a call, and was none
            self._keep(choice)
            queue.put(choice)
        except Exception as error:  # noqa: BLE001 - raised again by the one who reads the queue
            queue.close(error)

    def _choice(self, index: int, turn: Turn) -> Choice:
        sampled = turn.generation.tokens.tolist()
        text = cut_at(self.capture.port.tokenizer.decode(sampled), self.request.stops)
        calls: list[dict[str, Any]] = []
        forced_tool = self.request.forced_tool
        if forced_tool is not None:
            text, calls = "", forced_calls(forced_tool, text)
        elif self.request.offered_tools:
            text, calls = split_calls(text)
        finish = "tool_calls" if calls else "stop"
        is_cut = turn.generation.finish_reason is FinishReason.LENGTH
        if is_cut and (not calls or forced_tool is not None):
            finish = "length"
        return Choice(index=index, text=text, calls=calls, finish=finish, turn=turn)
