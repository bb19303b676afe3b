"""Streaming calls of a server: one per purpose and member, which can be ended from outside.

`StreamRegistry.open` is used around the body of a streaming call. Another stream of the same member
and purpose, or the end of the session, ends the body at once, wherever it waits, with an error of
its own.
"""

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager

import grpc
import grpc.aio
import structlog

from astraflow.core.ids import MemberId
from astraflow.rpc.auth import Context


class StreamReplaced(Exception):  # noqa: N818 - an event, not an error
    """Another stream took the place of the one that it ends."""


class StreamClosed(Exception):  # noqa: N818 - an event, not an error
    """The member ended its session itself, and with it the stream."""


class RegisteredStream:
    """One stream: the task that runs its body, and what ends it from outside."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._task = asyncio.current_task()

    def end(self, error: Exception) -> None:
        """Make the body end with `error`; the first one counts."""
        if self.error is None:
            self.error = error
            if self._task is not None:
                self._task.cancel()

    def take_back(self) -> bool:
        """Take back what `end` asked of the task; return whether nobody else cancelled it."""
        return self.error is not None and self._task is not None and self._task.uncancel() == 0


class StreamRegistry:
    """Who streams what."""

    def __init__(self) -> None:
        self._streams: dict[MemberId, dict[str, RegisteredStream]] = {}

    @contextmanager
    def open(self, member_id: MemberId, purpose: str) -> Generator[None]:
        """Run the body of a stream; the one before it is ended with StreamReplaced."""
        stream, streams = RegisteredStream(), self._streams.setdefault(member_id, {})
        older, streams[purpose] = streams.get(purpose), stream
        if older is not None:
            older.end(StreamReplaced(f"another stream of {member_id} took over {purpose}"))
        try:
            yield
        except asyncio.CancelledError:
            if not stream.take_back():
                raise
        except BaseException:
            stream.take_back()
            raise
        else:
            stream.take_back()
        finally:
            self._forget(member_id, purpose, stream)
        if stream.error is not None:
            raise stream.error

    def end(self, member_id: MemberId, error: Exception, *, among: tuple[str, ...] = ("",)) -> None:
        """End the streams of a member whose purposes begin so; left out: all."""
        for purpose, stream in self._streams.get(member_id, {}).items():
            if purpose.startswith(among):
                stream.end(error)

    def has(self, member_id: MemberId, purpose: str) -> bool:
        """Whether there is a stream."""
        return purpose in self._streams.get(member_id, {})

    def _forget(self, member_id: MemberId, purpose: str, stream: RegisteredStream) -> None:
        """Forget a stream, unless another one took its place."""
        streams = self._streams.get(member_id, {})
        if streams.get(purpose) is stream:
            del streams[purpose]
            if not streams:
                del self._streams[member_id]


log = structlog.get_logger(__name__)


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
