"""StreamHost: serves transfers over stream sockets, TCP or local ones."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Final

from astraflow.core.errors import AstraflowError
from astraflow.transport.frames import (
    HEADER_NBYTES,
    MAX_CALL_NBYTES,
    Frame,
    FrameKind,
    bad_frame,
    failure_frame,
    is_proven,
    read_request,
    unpack,
)
from astraflow.transport.groups import Carrier, ConnectionGroup
from astraflow.transport.sockets import Tasks, readable, receive, send_all, tune
from astraflow.transport.transfers import (
    Awaited,
    OpenStanding,
    OpenTransfer,
    Secrets,
    StandingTransfer,
    Transfer,
)

_HELLO_TIMEOUT_S: Final = 10.0
_MAX_CONNECTIONS: Final = 4096
_BACKLOG: Final = 512

ClaimTransfer = Callable[[bytes], Transfer | Awaited]


class StreamHost:
    """Accepts connections, lets in who has a transfer's token, and serves group by group."""

    def __init__(
        self,
        *,
        claim: ClaimTransfer,
        open_transfer: OpenTransfer,
        secrets: Secrets,
        carrier: Callable[[], Carrier],
        stand_ready: OpenStanding | None = None,
    ) -> None:
        """Prepare; `listen` starts it.

        Args:
            claim: Hands over the transfer of a token, or raises.
            open_transfer: Opens another one for a puller whose connections stand.
            secrets: Of the run: who proves one may ask.
            carrier: Makes what each group sends its chunks with.
            stand_ready: Opens a transfer of a version that is still to come; None: none is.
        """
        self._claim = claim
        self._open_transfer = open_transfer
        self._secrets = secrets
        self._carrier = carrier
        self._stand_ready = stand_ready
        self._tasks = Tasks()
        self._groups: dict[bytes, ConnectionGroup] = {}
        self._listeners: list[socket.socket] = []
        self._count = 0
        self._connections: set[socket.socket] = set()

    @property
    def connection_count(self) -> int:
        return self._count

    def listen(self, listener: socket.socket) -> None:
        """Serve a bound socket; it is closed with the host."""
        listener.setblocking(False)
        listener.listen(_BACKLOG)
        self._listeners.append(listener)
        self._tasks.start(self._accept(listener))

    async def close(self) -> None:
        await self._tasks.close()
        # Those whose task was cancelled before it began.
        for connection in self._connections:
            connection.close()
        for group in list(self._groups.values()):
            await group.close()
        self._groups.clear()
        for listener in self._listeners:
            listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            await readable(listener)
            try:
                connection, _ = listener.accept()
            except OSError:
                # Out of descriptors, or the caller left before: others may do better.
                await asyncio.sleep(0.1)
                continue
            connection.setblocking(False)
            if self._count >= _MAX_CONNECTIONS:
                connection.close()
            else:
                self._connections.add(connection)
                self._tasks.start(self._serve(connection))

    async def _serve(self, connection: socket.socket) -> None:
        self._count += 1
        try:
            tune(connection)
            await self._welcome(connection)
        except (AstraflowError, OSError, EOFError, TimeoutError):
            # A peer that is gone, silent or not one of ours costs its connection.
            return
        finally:
            self._count -= 1
            self._connections.discard(connection)
            connection.close()

    async def _welcome(self, connection: socket.socket) -> None:
        async with asyncio.timeout(_HELLO_TIMEOUT_S):
            frame, token = await _read(connection, receive(connection, HEADER_NBYTES))
        if frame.kind is not FrameKind.HELLO:
            raise bad_frame("a connection begins with a token")
        try:
            group = self._groups.get(token) or self._found(token)
        except AstraflowError as error:
            await send_all(connection, [failure_frame(error)])
            raise
        try:
            group.join(connection)
            while True:
                await self._obey(connection, group)
        finally:
            # The puller asks for what is missing in another way.
            self._groups.pop(token, None)
            await group.close()

    def _found(self, token: bytes) -> ConnectionGroup:
        """Begin a group with the first connection that has its token."""
        transfer = None if is_proven(token, b"", self._secrets()) else self._claim(token)
        group = self._groups[token] = ConnectionGroup(self._carrier())
        if isinstance(transfer, StandingTransfer):
            group.stand_ready(transfer)
        elif transfer is not None:
            group.begin(transfer, with_plan=False)
        return group

    async def _obey(self, connection: socket.socket, group: ConnectionGroup) -> None:
        frame, body = await _read(connection, group.carrier.read_header(connection))
        if frame.kind is FrameKind.ARENA:
            return
        if frame.kind is not FrameKind.REQUEST:
            raise bad_frame("only a puller's requests are expected here")
        try:
            spec = read_request(body, self._secrets())
            standing = None if self._stand_ready is None else self._stand_ready(spec)
            if standing is None:
                group.begin(self._open_transfer(spec), with_plan=True)
            else:
                group.stand_ready(standing)
        except AstraflowError as error:
            group.refuse(error)


async def _read(connection: socket.socket, header: Awaitable[bytes]) -> tuple[Frame, bytes]:
    """Read one frame of a puller; they are small."""
    frame = unpack(await header)
    if frame.body_nbytes > MAX_CALL_NBYTES:
        raise bad_frame("it is larger than what a puller may send")
    return frame, await receive(connection, frame.body_nbytes)
