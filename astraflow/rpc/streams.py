"""Streaming calls of a server: one per purpose and member, which can be ended from outside.

`StreamRegistry.open` is used around the body of a streaming call. Another stream of the same member
and purpose, or the end of the session, ends the body at once, wherever it waits, with an error of
its own.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, NoReturn, Protocol, Self

import grpc
import grpc.aio
import structlog

from astraflow.core.ids import MemberId
from astraflow.rpc.auth import HasMetadata


class StreamReplaced(Exception):  # noqa: N818 - an event, not an error
    """Another stream took the place of the one that it ends."""


class StreamClosed(Exception):  # noqa: N818 - an event, not an error
    """The member ended its session itself, and with it the stream."""


class RegisteredStream:
    """The place of one stream; a context manager around its body."""

    def __init__(self, registry: "StreamRegistry", member_id: MemberId, purpose: str) -> None:
        self._registry = registry
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
        self._registry.register(self._key, self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._registry.unregister(self._key, self)
        if self._task is not None and self._error is not None:
            is_ours = self._task.uncancel() == 0 and kind is asyncio.CancelledError
            if is_ours or kind is None:
                raise self._error from None


class StreamRegistry:
    """Who streams what."""

    def __init__(self) -> None:
        self._streams: dict[MemberId, dict[str, RegisteredStream]] = {}

    def open(self, member_id: MemberId, purpose: str) -> RegisteredStream:
        """Return a context to run the body in; entering it ends the stream before it."""
        return RegisteredStream(self, member_id, purpose)

    def end(self, member_id: MemberId, error: Exception) -> None:
        """End all streams of a member."""
        for stream in list(self._streams.get(member_id, {}).values()):
            stream.end(error)

    def has(self, member_id: MemberId, purpose: str) -> bool:
        """Whether there is a stream."""
        return purpose in self._streams.get(member_id, {})

    def register(self, key: tuple[MemberId, str], stream: RegisteredStream) -> None:
        """Note a stream; the one before it is ended with StreamReplaced."""
        streams = self._streams.setdefault(key[0], {})
        older = streams.get(key[1])
        streams[key[1]] = stream
        if older is not None:
            older.end(StreamReplaced(f"another stream of {key[0]} took over {key[1]}"))

    def unregister(self, key: tuple[MemberId, str], stream: RegisteredStream) -> None:
        """Forget a stream, unless another one took its place."""
        streams = self._streams.get(key[0], {})
        if streams.get(key[1]) is stream:
            del streams[key[1]]
            if not streams:
                del self._streams[key[0]]


log = structlog.get_logger(__name__)


class Context(HasMetadata, Protocol):
    """What servicers use of a call; grpc.aio has no types of its own."""

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        """Return what TLS says of the caller; empty without TLS."""
        ...

    def time_remaining(self) -> float | None:
        """Return the seconds until the call's deadline; None: it has none."""
        ...

    async def write(self, message: Any) -> None:
        """Send one message; waits while the peer does not read."""
        ...

    async def send_initial_metadata(self, initial_metadata: tuple[()]) -> None:
        """Answer that the call has begun; otherwise the first message does."""
        ...

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        """End the call with a status."""
        ...


@asynccontextmanager
async def exclusive_stream(
    registry: StreamRegistry, member_id: MemberId, purpose: str, context: Context
) -> AsyncGenerator[None]:
    """Run the body of a streaming call: one per purpose and member.

    A peer that is gone ends the body without an error. A member that ends its session ends its
    streams with OK. A stream that another one replaced ends with ABORTED: no reason of the
    table applies, since nothing went wrong.
    """
    try:
        with registry.open(member_id, purpose):
            # A peer that opened a stream learns at once that it is open.
            await context.send_initial_metadata(())
            yield
    except StreamReplaced as replaced:
        await context.abort(grpc.StatusCode.ABORTED, str(replaced))
    except StreamClosed:
        return
    except grpc.aio.InternalError:
        # A read or write on a call whose peer is gone; nobody is left to answer.
        log.debug("stream was cut", member=member_id, purpose=purpose)
