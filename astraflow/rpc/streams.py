"""How streaming calls run: seated, in two directions, ended cleanly."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, NoReturn, Protocol

import grpc
import grpc.aio
import structlog

from astraflow.core.ids import MemberId
from astraflow.rpc.seats import Seats, SessionLeft, StreamReplaced

log = structlog.get_logger(__name__)


class Context(Protocol):
    """What servicers use of a call; grpc.aio has no types of its own."""

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]] | None:
        """Return the caller's metadata."""
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
async def seated(
    seats: Seats, member_id: MemberId, purpose: str, context: Context
) -> AsyncGenerator[None]:
    """Run the body of a streaming call in its seat.

    A peer that is gone ends the body without an error. A member that ends its session ends its
    streams with OK. A stream that another one replaced ends with ABORTED: no reason of the
    table applies, since nothing went wrong.
    """
    try:
        with seats.take(member_id, purpose):
            # A peer that opened a stream learns at once that it sits.
            await context.send_initial_metadata(())
            yield
    except StreamReplaced as replaced:
        await context.abort(grpc.StatusCode.ABORTED, str(replaced))
    except SessionLeft:
        return
    except grpc.aio.InternalError:
        # A read or write on a call whose peer is gone; nobody is left to answer.
        log.debug("stream was cut", member=member_id, purpose=purpose)


async def together(*parts: Coroutine[Any, Any, None]) -> None:
    """Run parts side by side until all have ended, or one fails and ends the others.

    Raises:
        Exception: What the first part to fail raised, as it was raised.
    """
    try:
        async with asyncio.TaskGroup() as group:
            for part in parts:
                group.create_task(part)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def either(*parts: Coroutine[Any, Any, None]) -> None:
    """Run parts side by side until the first one ends, then end the others.

    Raises:
        Exception: What the first part to fail raised, as it was raised.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(part) for part in parts]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
