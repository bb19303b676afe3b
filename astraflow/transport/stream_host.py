"""StreamHost: serves transfers over stream sockets and UCX."""

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from typing import Final

from astraflow.core.errors import AstraflowError
from astraflow.core.versions import LaneKind
from astraflow.transport.frames import (
    HEADER_NBYTES,
    MAX_CALL_NBYTES,
    FrameKind,
    bad_frame,
    read_request,
    unpack,
)
from astraflow.transport.groups import Carrier, Connection, ConnectionGroup, Transfers
from astraflow.transport.handshake import GROUP_NBYTES, HELLO_NBYTES, Channel, SourceHandshake
from astraflow.transport.sockets import SocketConnection, Tasks, kept, readable, tune

_HELLO_TIMEOUT_S: Final = 5.0
_MAX_CONNECTIONS: Final = 4096
# More that have proven nothing push the oldest out. Eight far pullers at once bring 768.
_MAX_UNPROVEN: Final = 1024
_BACKLOG: Final = 512
# A puller asks for one version, then for the next. What waits keeps versions in memory.
_MAX_REQUESTS: Final = 16


class StreamHost:
    """Accepts connections, lets in who knows the secret of the run, and serves group by group."""

    def __init__(
        self,
        lane: LaneKind,
        transfers: Transfers,
        *,
        carrier: Callable[[], Carrier],
        seals: bool = False,
    ) -> None:
        self._lane = lane
        self._seals = seals
        self._transfers = transfers
        self._carrier = carrier
        self._tasks = Tasks()
        self._groups: dict[bytes, ConnectionGroup] = {}
        self._listeners: list[socket.socket] = []
        self._connections: set[Connection] = set()
        # The oldest first.
        self._unproven: dict[Connection, None] = {}

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
                accepted, _ = listener.accept()
                with kept(accepted):
                    tune(accepted)
            except OSError:
                # Out of descriptors, or the caller left before: others may do better.
                await asyncio.sleep(0.1)
                continue
            self._admit(SocketConnection(accepted))

    def _admit(self, connection: Connection) -> None:
        if len(self._connections) >= _MAX_CONNECTIONS:
            connection.close()
            return
        if len(self._unproven) >= _MAX_UNPROVEN:
            next(iter(self._unproven)).end()
        self._connections.add(connection)
        self._unproven[connection] = None
        self._tasks.start(self._serve(connection))

    async def _serve(self, connection: Connection) -> None:
        try:
            await self._welcome(connection)
        except (AstraflowError, OSError, EOFError, TimeoutError):
            # A peer that is gone, silent or not one of ours costs its connection.
            return
        finally:
            self._connections.discard(connection)
            self._unproven.pop(connection, None)
            connection.close()

    async def _welcome(self, connection: Connection) -> None:
        handshake = SourceHandshake(self._lane, seals=self._seals)
        async with asyncio.timeout(_HELLO_TIMEOUT_S):
            await connection.send([handshake.greeting])
            hello = await connection.receive(HELLO_NBYTES)
        name = hello[:GROUP_NBYTES]
        group = self._groups.get(name)
        known = self._transfers.secrets() if group is None else [group.secret]
        # No early exit: how long it takes tells nothing of the secrets.
        proven = [each for each in known if handshake.is_proven(hello, each)]
        if not proven:
            # Who proves nothing learns nothing: his connection ends.
            return
        if group is None:
            group = self._groups[name] = ConnectionGroup(self._carrier(), proven[0])
        self._unproven.pop(connection, None)
        try:
            welcome, channel = handshake.welcome(hello, group.secret)
            await connection.send([welcome])
            group.join(connection, channel)
            while True:
                await self._obey(connection, channel, group)
        finally:
            # The puller asks for what is missing in another way.
            self._groups.pop(name, None)
            await group.close()

    async def _obey(self, connection: Connection, channel: Channel, group: ConnectionGroup) -> None:
        header_nbytes = channel.record_nbytes(HEADER_NBYTES)
        header = await group.carrier.read_header(connection, header_nbytes)
        frame = unpack(channel.opened(header))
        if frame.body_nbytes > MAX_CALL_NBYTES:
            raise bad_frame("it is larger than what a puller may send")
        record = await connection.receive(channel.record_nbytes(frame.body_nbytes))
        body = channel.opened(record)
        if frame.kind is FrameKind.ARENA:
            return
        if frame.kind is not FrameKind.REQUEST:
            raise bad_frame("only a puller's requests are expected here")
        if group.request_count >= _MAX_REQUESTS:
            raise bad_frame("more requests wait than a puller has a use for")
        try:
            spec = read_request(body, partial(channel.is_proven, self._transfers.secrets()))
            group.begin(self._transfers.open(spec))
        except AstraflowError as error:
            group.refuse(error)
