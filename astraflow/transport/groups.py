"""Groups: connections of one puller to one source, which share what is sent.

Together they send no faster than their way carries.

Each connection finds its own rate, and all of them at once find too much: after a silence they
would overrun the narrow place with what each believes to have alone, and pay for it with round
trips of repeats. So after a transfer that lost more than chance takes, the group's rate is
bounded by what arrived; transfers without such losses move the bound up again.
"""

import asyncio
import socket
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, Protocol

from astraflow.core.errors import AstraflowError
from astraflow.transport.frames import (
    FrameKind,
    chunk_frames,
    failure_frame,
    pack,
    plan_parts,
    whole_frame,
)
from astraflow.transport.handshake import Channel
from astraflow.transport.sockets import (
    LONG_WAY_US,
    SocketConnection,
    Tasks,
    TcpInfo,
    tcp_info,
    tune_for_long_way,
)
from astraflow.wire.transfers import SentItem, TransferPlan, TransferSpec, Waiting
from astraflow.wire.weights import SentChunk

_SO_MAX_PACING_RATE: Final = 47
_NO_BOUND: Final = 0xFFFF_FFFF

# Above it packets were dropped for want of room: ten times what a bad line loses by chance.
_CROWDED_SHARE: Final = 0.01
_HEADROOM: Final = 1.25
_RISE: Final = 1.1
_MEMORY: Final = 8


def next_bound(before: TcpInfo, now: TcpInfo, best: float, bound: float | None) -> float | None:
    """Return the bytes per second that a group may send next; None: as many as it can.

    `best` is the most that it delivered in any of its last transfers.

    After 1,000 packets of which 20 were sent again, and 100 MB/s at best: 125 MB/s. After
    1,000 of which 1 was: 10 % more than the bound before.
    """
    packets = now.packet_count - before.packet_count
    repeats = now.repeat_count - before.repeat_count
    if before.packet_count and repeats > packets * _CROWDED_SHARE:
        return best * _HEADROOM
    return None if bound is None else bound * _RISE


_NEAR_SEGMENT_NBYTES: Final = 1 << 20
_FAR_SEGMENT_NBYTES: Final = 64 << 10
_QUEUE_LENGTH: Final = 64

# So little goes with what is behind it in one call, and wakes the puller up once.
_BRIEF_NBYTES: Final = 16 << 10

# Four packets carry it. Alone after a silence, its acknowledgement lets BBR measure its connection
# anew, with no more than four packets on their way for some round trips.
_FEW_PACKETS_NBYTES: Final = 4 << 10

# Up to here one connection that knows the whole way beats many that each know a share of it.
_SMALL_NBYTES: Final = 8 << 20

# A puller that is alive takes something within this time.
_SEND_TIMEOUT_S: Final = 120.0

Part = Sequence[bytes | memoryview]
"""Buffers that go over one connection, one behind the other."""


class Transfer(Protocol):
    """What one puller asked for; some of it may still be on its way here, or not be made yet.

    What it needs is kept until `close`.
    """

    @property
    def plan(self) -> TransferPlan:
        """What is sent; without patches that is not known yet, and its payload is a guess."""
        ...

    def items(self) -> AsyncGenerator[SentItem]:
        """Yield the plan and its chunks, each when it is there; chunks may come before the plan.

        Waiting says that there is nothing yet.
        """
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """What lanes serve.

    Attributes:
        open: Opens what a puller asks for over connections that stand.
        secrets: Of the run: who knows one of them is let in.
    """

    open: Callable[[TransferSpec], Transfer]
    secrets: Callable[[], Sequence[bytes]]


class Connection(Protocol):
    """One connection of a puller, at its source: over a socket, or UCX."""

    async def send(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Send buffers, of which UCX makes a message each; raises OSError when the peer is gone."""
        ...

    def send_some(self, buffers: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
        """Send what there is room for; return what is left of the buffers."""
        ...

    async def receive(self, nbytes: int) -> bytes:
        """Receive so many bytes; raises EOFError or OSError when the peer is gone."""
        ...

    def end(self) -> None:
        """End it both ways, for whoever waits on it; closing is left to its owner."""
        ...

    def close(self) -> None: ...


class Carrier:
    """Brings chunks into the form in which a lane sends them, one transfer after the other.

    Payloads follow their headers; long ones are cut, the finer the longer the way.

    Attributes:
        is_prompt: Whether the puller answers what comes first: it is not kept back for more. Such
            a lane is never sealed.
    """

    is_prompt = False

    def __init__(self, segment_nbytes: int = _NEAR_SEGMENT_NBYTES) -> None:
        self._segment_nbytes = segment_nbytes
        self._is_first = True
        self._paced: list[socket.socket] = []
        self._before = TcpInfo()
        self._rates: deque[int] = deque(maxlen=_MEMORY)
        self._bound: float | None = None

    def adopt(self, connection: Connection) -> None:
        """Tune a connection to the way that it has; the first one sends alone, at its own rate."""
        sock = connection.sock if isinstance(connection, SocketConnection) else None
        if sock is not None and tcp_info(sock).round_trip_us > LONG_WAY_US:
            tune_for_long_way(sock)
            self._segment_nbytes = _FAR_SEGMENT_NBYTES
            if not self._is_first:
                self._paced.append(sock)
        self._is_first = False

    async def read_header(self, connection: Connection, nbytes: int) -> bytes:
        return await connection.receive(nbytes)

    async def begin(self) -> None:
        """Return once chunks can be taken, at a pace by what the transfer before met."""
        if not self._paced:
            return
        now = TcpInfo(*map(sum, zip(*map(tcp_info, self._paced), strict=True)))
        self._rates.append(now.bytes_per_s)
        self._bound = next_bound(self._before, now, max(self._rates), self._bound)
        self._before = now
        if self._bound is not None:
            rate = min(max(int(self._bound / len(self._paced)), 1), _NO_BOUND)
            for each in self._paced:
                with suppress(OSError):
                    each.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, rate)

    async def parts(self, sent: SentChunk) -> Sequence[Part]:
        return [[pack(frame), body] for frame, body in chunk_frames(sent, self._segment_nbytes)]

    def close(self) -> None: ...


class ConnectionGroup:
    """Sends one transfer after the other over its connections.

    A large transfer goes over all but the first: each takes the next part when it has room, so
    a fast one takes more. A small one goes over the first alone. Its rate was found alone too;
    the others' rates are shares of the way, and a small transfer is over before they grow.

    Attributes:
        carrier: Of its lane.
        secret: That all of them prove.
        request_count: Requests that are not answered yet.
    """

    def __init__(self, carrier: Carrier, secret: bytes) -> None:
        self.carrier = carrier
        self.secret = secret
        self.request_count = 0
        self._connections: set[Connection] = set()
        self._parts: asyncio.Queue[Part] = asyncio.Queue(_QUEUE_LENGTH)
        # Short: what waits here when the others join goes over a connection that is new.
        self._first_parts: asyncio.Queue[Part] = asyncio.Queue(2)
        self._first: Connection | None = None
        self._first_unsent_count = 0
        self._tasks = Tasks()
        self._feeding: asyncio.Task[None] | None = None

    def join(self, connection: Connection, channel: Channel) -> None:
        parts = self._parts if self._connections else self._first_parts
        self._first = self._first or connection
        self._connections.add(connection)
        self.carrier.adopt(connection)
        self._tasks.start(self._send(connection, channel, parts))

    def begin(self, transfer: Transfer) -> None:
        feeding = self._answer(self._feed(transfer, self._feeding))
        # One that is cancelled before its turn has run nothing of its own.
        feeding.add_done_callback(lambda _: transfer.close())

    def refuse(self, error: AstraflowError) -> None:
        self._answer(self._put_first(failure_frame(error)))

    async def close(self) -> None:
        """End what is under way; who reads from a connection finds it ended. Idempotent."""
        await self._tasks.close()
        self.carrier.close()
        for connection in self._connections:
            connection.end()
        self._connections.clear()

    def _answer(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        def answered(_: object) -> None:
            self.request_count -= 1

        self.request_count += 1
        self._feeding = self._tasks.start(work)
        self._feeding.add_done_callback(answered)
        return self._feeding

    async def _feed(self, transfer: Transfer, before: "asyncio.Task[None] | None") -> None:
        has_begun = False
        try:
            if before is not None:
                await asyncio.wait([before])
            async with aclosing(transfer.items()) as items:
                async for item in items:
                    if isinstance(item, Waiting):
                        await self._put_first(whole_frame(FrameKind.WAITING, b""))
                        continue
                    nbytes = transfer.plan.payload_nbytes
                    if isinstance(item, TransferPlan):
                        for header, body in plan_parts(item, _FAR_SEGMENT_NBYTES):
                            is_first = len(body) <= _FEW_PACKETS_NBYTES
                            await self._put(0 if is_first else nbytes, [header, body])
                    if not has_begun:
                        await self.carrier.begin()
                        has_begun = True
                    if isinstance(item, SentChunk):
                        for part in await self.carrier.parts(item):
                            await self._put(nbytes, part)
            await self._parts.join()
            await self._first_parts.join()
        except AstraflowError as error:
            await self._put_first(failure_frame(error))

    async def _put(self, nbytes: int, part: Part) -> None:
        if nbytes <= _SMALL_NBYTES or len(self._connections) == 1:
            await self._put_first(part)
        else:
            await self._parts.put(part)

    async def _put_first(self, part: Part) -> None:
        if self.carrier.is_prompt and self._first is not None and not self._first_unsent_count:
            # Whoever sends what is left meets the error as well.
            with suppress(OSError):
                part = self._first.send_some(part)
            if not part:
                return
        self._first_unsent_count += 1
        await self._first_parts.put(part)

    async def _send(
        self, connection: Connection, channel: Channel, parts: "asyncio.Queue[Part]"
    ) -> None:
        try:
            while True:
                batch = [await parts.get()]
                nbytes = sum(map(len, batch[0]))
                while not parts.empty() and nbytes < _BRIEF_NBYTES:
                    batch.append(parts.get_nowait())
                    nbytes += sum(map(len, batch[-1]))
                async with asyncio.timeout(_SEND_TIMEOUT_S):
                    records = chain.from_iterable(map(channel.sealed, batch))
                    await connection.send([*records])
                for _ in batch:
                    parts.task_done()
                if parts is self._first_parts:
                    self._first_unsent_count -= len(batch)
        except (OSError, TimeoutError):
            connection.end()
