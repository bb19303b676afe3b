"""Doors: how an episode is opened to an agent that is not part of this process."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from astraflow.workflows.agents.session import AgentSession


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrance:
    """Where an agent finds its episode.

    Attributes:
        base_url: For clients of OpenAI's API; of this episode alone.
        session_url: Where its reward is reported and its end.
        key: For clients that tell episodes by their API key.
    """

    base_url: str
    session_url: str
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """Where an agent that serves many episodes asks for its next one.

    Attributes:
        url: To POST to.
        token: Bearer token.
    """

    url: str
    token: str


class AgentDoor(Protocol):
    """Lets agents in."""

    def open(self, session: AgentSession) -> AbstractAsyncContextManager[Entrance]:
        """Serve a session until the end of the context."""
        ...

    async def queue(self, lane: str) -> Queue:
        """Return where the sessions of a lane are handed out."""
        ...

    def at_close(self, undo: Callable[[], Awaitable[None]]) -> None:
        """Have something undone when the door is closed for good."""
        ...

    def offer(self, session: AgentSession, lane: str) -> None:
        """Hand an open session to the next agent that asks for one."""
        ...
