"""StreamSession: a puller's connections to one source, kept warm from version to version."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from functools import partial
from secrets import token_bytes
from typing import Any, Final

import numpy as np

from astraflow.core.errors import AstraflowError
from astraflow.core.versions import LaneKind
from astraflow.transport.assembly import FrameInbox, Lend
from astraflow.transport.frames import HEADER_NBYTES, bad_frame, request, source_lost, unpack
from astraflow.transport.handshake import (
    GREETING_NBYTES,
    GROUP_NBYTES,
    WELCOME_NBYTES,
    Channel,
    PullerHandshake,
)
from astraflow.transport.sockets import Tasks
from astraflow.wire.transfers import SentItem, TransferSpec

CONNECT_TIMEOUT_S: Final = 5.0

# A buffer for records of this size is kept from one to the next.
_SCRATCH_NBYTES: Final = 128 << 10

Dial = Callable[["PullerConnection"], Awaitable[object]]
"""Connects it to a source, over a socket or UCX; raises OSError."""


class StreamSession:
    """Receives one transfer after the other over its connections.

    Whatever goes wrong ends the session: the connections are closed, and the transfer under way
    fails with the reason.

    Attributes:
        lane: That it is of.
        inbox: Of the transfer under way; None: there is none.
        is_ahead: Whether that was asked for before there is one.
    """

    def __init__(
        self,
        lane: LaneKind,
        dial: Dial,
        *,
        stall_timeout_s: float,
        must_seal: bool = False,
        lend: Lend = lambda _: None,
    ) -> None:
        self.lane = lane
        self.inbox: FrameInbox | None = None
        self.is_ahead = False
        self._dial = dial
        self._stall_timeout_s = stall_timeout_s
        self._must_seal = must_seal
        self._lend = lend
        self._connections: list[PullerConnection] = []
        self._tasks = Tasks()
        self._ending: AstraflowError | None = None

    @property
    def is_idle(self) -> bool:
        return self._ending is None and bool(self._connections) and self.inbox is None

    @property
    def is_ended(self) -> bool:
        return self._ending is not None

    async def open(
        self, secret: bytes, *, count: int = 1, timeout_s: float = CONNECT_TIMEOUT_S
    ) -> None:
        """Connect, at once and in parallel; return when the first connection stands."""
        group = token_bytes(GROUP_NBYTES)
        seal = partial(PullerHandshake, self.lane, group, secret, must_seal=self._must_seal)
        left = {self._tasks.start(self._connect(seal(), timeout_s)) for _ in range(count)}
        try:
            while left and not self._connections and self._ending is None:
                _, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self.close()
            raise
        if not self._connections:
            error = self._ending or source_lost("no connection of the lane could be made")
            await self.close()
            raise error

    def ask(self, spec: TransferSpec, secret: bytes) -> None:
        """Expect a version, and ask for it over the connections that stand."""
        self.inbox = FrameInbox(
            bound=spec.bound,
            stall_timeout_s=self._stall_timeout_s,
            on_pressure=self._hold,
            on_plan=self._lend,
        )
        if self._ending is not None:
            self.inbox.fail(self._ending)
        self.is_ahead = spec.is_ahead
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

    async def _connect(self, handshake: PullerHandshake, timeout_s: float) -> None:
        connection = PullerConnection(self, handshake)
        try:
            async with asyncio.timeout(timeout_s):
                await self._dial(connection)
                await connection.greeted
            if self._ending is None and not connection.closed.is_set():
                self._connections.append(connection)
        except (OSError, TimeoutError):
            # Fewer connections are slower, and still right.
            pass
        except AstraflowError as error:
            self.end(error)
        finally:
            if connection not in self._connections:
                connection.abort()


class PullerConnection(asyncio.BufferedProtocol):
    """One connection to a source: headers into one place, bodies straight to where they belong.

    Attributes:
        closed: Set once it is.
        greeted: Its channel, once the source's greeting was answered; or what came instead.
    """

    def __init__(self, session: StreamSession, handshake: PullerHandshake) -> None:
        self.closed = asyncio.Event()
        self.greeted: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()
        self._session = session
        self._is_welcome = False
        self._transport: Any = None
        self._targets = self._receive(handshake)
        self._target = next(self._targets)
        self._filled = 0

    @property
    def channel(self) -> Channel:
        return self.greeted.result()

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
                self._target = next(self._targets)
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
        self.greeted.cancel()
        if self._transport is not None:
            self._transport.abort()

    def _receive(self, handshake: PullerHandshake) -> Generator[memoryview]:
        """Yield what is to be filled next: by greeting and welcome, then by frame after frame."""
        greeting, welcome = bytearray(GREETING_NBYTES), bytearray(WELCOME_NBYTES)
        yield memoryview(greeting)
        self._transport.write(handshake.hello(bytes(greeting)))
        channel = handshake.channel()
        # Whoever waited may have been cancelled meanwhile.
        if not self.greeted.done():
            self.greeted.set_result(channel)
        yield memoryview(welcome)
        handshake.check(bytes(welcome))
        self._is_welcome = True
        header = memoryview(bytearray(channel.record_nbytes(HEADER_NBYTES)))
        scratch = memoryview(b"")
        while True:
            yield header
            frame = unpack(channel.opened(bytes(header)))
            inbox = self._session.inbox
            if inbox is None:
                raise bad_frame("it belongs to no transfer")
            body = record = inbox.place(frame)
            nbytes = channel.record_nbytes(len(body))
            if nbytes > _SCRATCH_NBYTES and nbytes > len(body):
                record = np.empty(nbytes, np.uint8).data
            elif nbytes > len(body):
                scratch = scratch if nbytes <= len(scratch) else np.empty(nbytes, np.uint8).data
                record = scratch[:nbytes]
            yield record
            if record is not body:
                channel.open_into(record, body)
            inbox.filled(frame, body)
            # Not kept until the next frame comes.
            del inbox, body, record
