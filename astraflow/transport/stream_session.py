"""StreamSession: a puller's connections to one source, kept warm from version to version."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from secrets import token_bytes
from typing import Any, Final

import numpy as np

from astraflow.core.errors import AstraflowError
from astraflow.core.versions import LaneKind
from astraflow.transport.arenas import Arena
from astraflow.transport.assembly import FrameInbox
from astraflow.transport.frames import (
    HEADER_NBYTES,
    Frame,
    bad_frame,
    request,
    source_late,
    source_lost,
    unpack,
)
from astraflow.transport.handshake import (
    GREETING_NBYTES,
    GROUP_NBYTES,
    WELCOME_NBYTES,
    Channel,
    PullerHandshake,
)
from astraflow.transport.sockets import Tasks
from astraflow.wire.transfers import SentItem, TransferBound, TransferPlan, TransferSpec

CONNECT_TIMEOUT_S: Final = 5.0

Dial = Callable[["PullerConnection"], Awaitable[object]]
"""Connects it to a source, over a socket or UCX; raises OSError."""


class StreamSession:
    """Receives one transfer after the other over its connections.

    Whatever goes wrong ends the session: the connections are closed, and the transfer under way
    fails with the reason.

    Attributes:
        lane: That it is of.
        inbox: Of the transfer under way; None: there is none.
    """

    def __init__(
        self,
        lane: LaneKind,
        *,
        stall_timeout_s: float,
        must_seal: bool = False,
        arena_for: Callable[[TransferPlan], Arena | None] = lambda _: None,
    ) -> None:
        self.lane = lane
        self.inbox: FrameInbox | None = None
        self._stall_timeout_s = stall_timeout_s
        self._must_seal = must_seal
        self._arena_for = arena_for
        self._connections: list[PullerConnection] = []
        self._tasks = Tasks()
        self._connected = asyncio.Event()
        self._left = 0
        self._ending: AstraflowError | None = None

    @property
    def is_idle(self) -> bool:
        return self._ending is None and bool(self._connections) and self.inbox is None

    @property
    def is_ended(self) -> bool:
        return self._ending is not None

    async def open(
        self,
        secret: bytes,
        dial: Dial,
        *,
        count: int = 1,
        timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        """Connect, at once and in parallel; return when the first connection stands."""
        self._left = count
        group = token_bytes(GROUP_NBYTES)
        for _ in range(count):
            handshake = PullerHandshake(self.lane, group, secret, must_seal=self._must_seal)
            self._tasks.start(self._connect(dial, handshake, timeout_s))
        try:
            await self._connected.wait()
        except asyncio.CancelledError:
            self.end(source_lost("nobody waits for the session"))
            raise
        if not self._connections:
            error = self._ending or source_lost("no connection of the lane could be made")
            await self.close()
            raise error

    def begin(self, bound: TransferBound | None) -> FrameInbox:
        """Expect a transfer; its plan comes in a frame, unless the inbox is given it."""
        self.inbox = FrameInbox(
            bound=bound,
            stall_timeout_s=self._stall_timeout_s,
            on_pressure=self._hold,
            on_plan=self._arena_for,
        )
        if self._ending is not None:
            self.inbox.fail(self._ending)
        return self.inbox

    async def wait_plan(self, timeout_s: float) -> None:
        """Return once the plan has come, or the source waits for it itself."""
        if self.inbox is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self.inbox.planned()
        except TimeoutError:
            await self.close()
            raise source_late("no plan has come over the lane") from None
        except AstraflowError:
            await self.close()
            raise

    def ask(self, spec: TransferSpec, secret: bytes) -> None:
        first = self._connections[0]
        first.send(request(spec, partial(first.channel.prove, secret)))

    async def items(self) -> AsyncGenerator[SentItem]:
        inbox = self.inbox
        if inbox is None:
            raise source_lost("no transfer has begun")
        try:
            async for item in inbox.items():
                yield item
        finally:
            if inbox.is_over:
                self.inbox = None
            else:
                await self.close()

    def end(self, error: AstraflowError) -> None:
        if self._ending is None:
            self._ending = error
            if self.inbox is not None:
                self.inbox.fail(error)
            for connection in self._connections:
                connection.abort()

    async def close(self) -> None:
        self.end(source_lost("the session was closed"))
        await self._tasks.close()
        for connection in self._connections:
            await connection.closed.wait()

    def drop(self, connection: "PullerConnection") -> None:
        """Go on without a connection that the source has not welcomed: nothing came over it.

        The first one carries requests, so that without it there is no session.
        """
        if connection in self._connections[1:]:
            self._connections.remove(connection)
        elif connection in self._connections:
            self.end(source_lost("the source did not welcome the first connection of the lane"))

    def _hold(self, is_pressed: bool) -> None:
        for connection in self._connections:
            connection.hold(is_pressed)

    async def _connect(self, dial: Dial, handshake: PullerHandshake, timeout_s: float) -> None:
        connection = PullerConnection(self, handshake)
        try:
            async with asyncio.timeout(timeout_s):
                await dial(connection)
                await connection.greeted
            if self._ending is None and not connection.closed.is_set():
                self._connections.append(connection)
                self._connected.set()
        except (OSError, TimeoutError):
            # Fewer connections are slower, and still right.
            pass
        except AstraflowError as error:
            self.end(error)
        finally:
            if connection not in self._connections:
                connection.abort()
            self._left -= 1
            if not self._left:
                self._connected.set()


# A buffer for records of this size is kept from one to the next.
_SCRATCH_NBYTES: Final = 128 << 10


class PullerConnection(asyncio.BufferedProtocol):
    """One connection to a source: headers into one place, bodies straight to where they belong.

    Attributes:
        closed: Set once it is.
        greeted: Done once the source's greeting was answered; fails with what came instead.
    """

    def __init__(self, session: StreamSession, handshake: PullerHandshake) -> None:
        self.closed = asyncio.Event()
        self.greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._session = session
        self._handshake = handshake
        self._channel: Channel | None = None
        self._is_welcome = False
        self._transport: Any = None
        self._target = self._header = memoryview(bytearray(GREETING_NBYTES))
        self._filled = 0
        self._frame: Frame | None = None
        # Where the body of the frame belongs, and records that are still to be opened.
        self._place = memoryview(b"")
        self._scratch = memoryview(b"")

    @property
    def channel(self) -> Channel:
        if self._channel is None:
            raise source_lost("the connection does not stand yet")
        return self._channel

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        return self._target[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        if self._session.inbox is not None:
            self._session.inbox.touch()
        try:
            while self._filled == len(self._target):
                self._filled = 0
                self._advance()
        except AstraflowError as error:
            self.fail(error)

    def fail(self, error: AstraflowError) -> None:
        """End it, and the session once it is greeted: what came cannot be."""
        if self.greeted.done():
            self._session.end(error)
        else:
            self.greeted.set_exception(error)
        self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the session: what was under way here is lost."""
        self.closed.set()
        if not self.greeted.done():
            self.greeted.set_exception(ConnectionError("the source ended before its greeting"))
        elif not self._is_welcome:
            self._session.drop(self)
        else:
            self._session.end(source_lost(f"a connection of the lane was lost ({exc or 'ended'})"))

    def send(self, frame: Sequence[bytes]) -> None:
        """Send header and body; what fails shows in what is received."""
        for record in self.channel.sealed(frame):
            self._transport.write(record)

    def hold(self, is_pressed: bool) -> None:
        """Receive nothing more until this is called with False."""
        if is_pressed:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _advance(self) -> None:
        if self._channel is None:
            self._transport.write(self._handshake.hello(bytes(self._target)))
            self._channel = self._handshake.channel()
            self._target = memoryview(bytearray(WELCOME_NBYTES))
            # Whoever waited may have been cancelled meanwhile.
            if not self.greeted.done():
                self.greeted.set_result(None)
        elif not self._is_welcome:
            self._handshake.check(bytes(self._target))
            self._is_welcome = True
            header_nbytes = self._channel.record_nbytes(HEADER_NBYTES)
            self._target = self._header = memoryview(bytearray(header_nbytes))
        elif self._frame is None:
            self._frame = unpack(self._channel.opened(bytes(self._header)))
            if self._session.inbox is None:
                raise bad_frame("it belongs to no transfer")
            self._place = self._session.inbox.place(self._frame)
            self._target = self._body_target()
        else:
            frame, body, self._frame = self._frame, self._place, None
            if self._target is not body:
                self._channel.open_into(self._target, body)
            self._target, self._place = self._header, memoryview(b"")
            if self._session.inbox is not None:
                self._session.inbox.filled(frame, body)

    def _body_target(self) -> memoryview:
        """Return where a body is received: its place, or room for its record."""
        nbytes = self.channel.record_nbytes(len(self._place))
        if nbytes == len(self._place):
            return self._place
        if nbytes > _SCRATCH_NBYTES:
            return np.empty(nbytes, np.uint8).data
        if nbytes > len(self._scratch):
            self._scratch = np.empty(nbytes, np.uint8).data
        return self._scratch[:nbytes]
