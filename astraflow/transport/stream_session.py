"""StreamSession: a puller's connections to one source, kept warm from version to version."""

import asyncio
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Final

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.versions import LaneKind
from astraflow.transport.arenas import Arena
from astraflow.transport.assembly import FrameInbox, source_lost
from astraflow.transport.frames import HEADER_NBYTES, Frame, bad_frame, hello, request, unpack
from astraflow.transport.sockets import Tasks
from astraflow.wire.transfers import SentItem, TransferBound, TransferPlan, TransferSpec

CONNECT_TIMEOUT_S: Final = 5.0

Dial = Callable[[], Awaitable[socket.socket]]
"""Returns a connected socket, or raises OSError."""


class SocketSession:
    """Receives one transfer after the other over its connections.

    Whatever goes wrong ends the session: the connections are closed, and the transfer under way
    fails with the reason.

    Attributes:
        lane: That it is of.
    """

    def __init__(
        self,
        lane: LaneKind,
        *,
        stall_timeout_s: float,
        arena_for: Callable[["SocketSession", TransferPlan], Arena | None] = lambda _, __: None,
    ) -> None:
        """Start without a connection.

        Args:
            lane: That it is of.
            stall_timeout_s: A source that sends nothing for so long is given up.
            arena_for: Called with the session and each plan; returns where payloads will lie,
                None: in frames.
        """
        self.lane = lane
        self._stall_timeout_s = stall_timeout_s
        self._arena_for = arena_for
        self._connections: list[_Connection] = []
        self._tasks = Tasks()
        self._connected = asyncio.Event()
        self._left = 0
        self._inbox: FrameInbox | None = None
        self._ending: AstraflowError | None = None

    @property
    def is_idle(self) -> bool:
        """Whether it stands and another transfer can begin."""
        return self._ending is None and bool(self._connections) and self._inbox is None

    @property
    def is_ended(self) -> bool:
        return self._ending is not None

    @property
    def since_s(self) -> float | None:
        """When the first bytes of the transfer came, by the monotonic clock; None: none have."""
        return None if self._inbox is None else self._inbox.since_s

    async def open(
        self,
        token: bytes,
        dial: Dial,
        *,
        count: int = 1,
        timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        """Connect, at once and in parallel; return when the first connection stands.

        Raises:
            AstraflowError: SOURCE_UNREACHABLE when none could be made in time.
        """
        self._left = count
        first = hello(token, connection_count=count)
        for _ in range(count):
            self._tasks.start(self._connect(dial, first, timeout_s))
        await self._connected.wait()
        if not self._connections:
            await self.close()
            raise source_lost("no connection of the lane could be made")

    def begin(self, bound: TransferBound | None, plan: TransferPlan | None = None) -> None:
        """Expect a transfer; without a plan it comes in a frame, or through `take_plan`.

        Args:
            bound: By what the run registered; None: nothing of it is.
            plan: Known already.

        Raises:
            AstraflowError: As `take_plan`.
        """
        self._inbox = FrameInbox(
            bound=bound,
            stall_timeout_s=self._stall_timeout_s,
            on_pressure=self._hold,
            on_plan=lambda known: self._arena_for(self, known),
        )
        if self._ending is not None:
            self._inbox.fail(self._ending)
        if plan is not None:
            self._inbox.take_plan(plan)

    def take_plan(self, plan: TransferPlan) -> None:
        if self._inbox is not None:
            self._inbox.take_plan(plan)

    async def wait_plan(self, timeout_s: float) -> None:
        """Return once the plan has come, or the source waits for it itself.

        Raises:
            AstraflowError: What came instead; SOURCE_TIMEOUT. The session is closed.
        """
        if self._inbox is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._inbox.planned()
        except TimeoutError:
            await self.close()
            raise AstraflowError(
                Reason.SOURCE_TIMEOUT, "no plan has come over the lane", retryable=True
            ) from None
        except AstraflowError:
            await self.close()
            raise

    def ask(self, spec: TransferSpec, secret: bytes) -> None:
        self._connections[0].write(request(spec, secret))

    def send_descriptor(self, frame: bytes, descriptor: int) -> None:
        """Send a frame with a file descriptor, to a peer on this host."""
        try:
            socket.send_fds(self._connections[0].sock, [frame], [descriptor])
        except OSError as error:
            self.end(source_lost(f"the source is gone: {error}"))

    async def items(self) -> AsyncGenerator[SentItem]:
        """Yield the plan and the chunks of the transfer that began, Waiting between them.

        Raises:
            AstraflowError: What the source answered; SOURCE_UNREACHABLE, SOURCE_TIMEOUT,
                CHUNK_INVALID.
        """
        inbox = self._inbox
        if inbox is None:
            raise source_lost("no transfer has begun")
        try:
            async for item in inbox.items():
                yield item
        finally:
            if inbox.is_over:
                self._inbox = None
            else:
                await self.close()

    def end(self, error: AstraflowError) -> None:
        """Close all connections; the transfer under way fails."""
        if self._ending is None:
            self._ending = error
            if self._inbox is not None:
                self._inbox.fail(error)
            for connection in self._connections:
                connection.abort()

    async def close(self) -> None:
        """Close all connections and wait until they are."""
        self.end(source_lost("the session was closed"))
        await self._tasks.close()
        for connection in self._connections:
            await connection.closed.wait()

    def place(self, frame: Frame) -> memoryview:
        if self._inbox is None:
            raise bad_frame("it belongs to no transfer")
        return self._inbox.place(frame)

    def filled(self, frame: Frame, body: memoryview) -> None:
        if self._inbox is not None:
            self._inbox.filled(frame, body)

    def touch(self) -> None:
        if self._inbox is not None:
            self._inbox.touch()

    def _hold(self, is_pressed: bool) -> None:
        for connection in self._connections:
            connection.hold(is_pressed)

    async def _connect(self, dial: Dial, first: bytes, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                sock = await dial()
            connection = _Connection(self, sock, first)
            await asyncio.get_running_loop().create_connection(lambda: connection, sock=sock)
            self._connections.append(connection)
            self._connected.set()
        except (OSError, TimeoutError):
            # Fewer connections are slower, and still right.
            pass
        finally:
            self._left -= 1
            if not self._left:
                self._connected.set()


class _Connection(asyncio.BufferedProtocol):
    """One connection: headers into one place, bodies straight to where they belong."""

    def __init__(self, session: SocketSession, sock: socket.socket, first: bytes) -> None:
        self.sock = sock
        self.closed = asyncio.Event()
        self._session = session
        self._first = first
        self._transport: Any = None
        self._header = memoryview(bytearray(HEADER_NBYTES))
        self._target = self._header
        self._filled = 0
        self._frame: Frame | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self.write(self._first)

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        return self._target[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """Go on with the next header or body when this one is complete."""
        self._filled += nbytes
        self._session.touch()
        try:
            while self._filled == len(self._target):
                self._advance()
        except AstraflowError as error:
            self._session.end(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the session: what was under way here is lost."""
        self.closed.set()
        self._session.end(source_lost(f"a connection of the lane was lost ({exc or 'ended'})"))

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def hold(self, is_pressed: bool) -> None:
        if is_pressed:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def abort(self) -> None:
        self._transport.abort()

    def _advance(self) -> None:
        frame = self._frame
        if frame is None:
            self._frame = frame = unpack(self._header)
            self._target = self._session.place(frame)
        else:
            body, self._target, self._frame = self._target, self._header, None
            self._session.filled(frame, body)
        self._filled = 0
