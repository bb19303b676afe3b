"""Seats: one stream per purpose and member, which can be ended from outside its task.

`Seats.take` is used around the body of a streaming call. Another stream for the same seat, or
the end of the session, ends the body at once, wherever it waits, with an error of its own.
"""

import asyncio
from types import TracebackType
from typing import Self

from astraflow.core.ids import MemberId


class StreamEnded(Exception):  # noqa: N818  # an event, not an error: see its subclasses
    """The body of a stream was ended from outside."""


class StreamReplaced(StreamEnded):
    """Another stream took the seat."""


class SessionLeft(StreamEnded):
    """The member ended its session itself."""


class Seat:
    """The place of one stream; a context manager around its body."""

    def __init__(self, seats: "Seats", member_id: MemberId, purpose: str) -> None:
        self._seats = seats
        self._key = (member_id, purpose)
        self._task: asyncio.Task[object] | None = None
        self._error: Exception | None = None

    def end(self, error: Exception) -> None:
        """Make the body end with `error`; the first one counts."""
        if self._error is None:
            self._error = error
            if self._task is not None:
                self._task.cancel()

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        self._seats.seat(self._key, self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._seats.leave(self._key, self)
        if self._task is not None and self._error is not None:
            is_ours = self._task.uncancel() == 0 and kind is asyncio.CancelledError
            if is_ours or kind is None:
                raise self._error from None


class Seats:
    """Who streams what."""

    def __init__(self) -> None:
        self._seats: dict[MemberId, dict[str, Seat]] = {}

    def take(self, member_id: MemberId, purpose: str) -> Seat:
        """Return the seat to run the body in; entering it ends the stream that had it."""
        return Seat(self, member_id, purpose)

    def end(self, member_id: MemberId, error: Exception) -> None:
        """End all streams of a member."""
        for seat in list(self._seats.get(member_id, {}).values()):
            seat.end(error)

    def has(self, member_id: MemberId, purpose: str) -> bool:
        """Whether a stream sits there."""
        return purpose in self._seats.get(member_id, {})

    def seat(self, key: tuple[MemberId, str], seat: Seat) -> None:
        """Let a stream sit down; whoever sat there is ended with StreamReplaced."""
        seats = self._seats.setdefault(key[0], {})
        older = seats.get(key[1])
        seats[key[1]] = seat
        if older is not None:
            older.end(StreamReplaced(f"another stream of {key[0]} took over {key[1]}"))

    def leave(self, key: tuple[MemberId, str], seat: Seat) -> None:
        """Let a stream go, unless another one took its seat."""
        seats = self._seats.get(key[0], {})
        if seats.get(key[1]) is seat:
            del seats[key[1]]
            if not seats:
                del self._seats[key[0]]
