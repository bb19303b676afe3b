"""Sockets: how lanes connect and listen, what is set on connections, and what runs for them.

SO_SNDBUF and SO_RCVBUF of TCP are never set: they would be clamped, and would switch off the
kernel's own tuning of both windows.
"""

import asyncio
import socket
import struct
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final, NamedTuple

import structlog

from astraflow.core.errors import AstraflowError, Reason
from astraflow.rpc.address import join_address
from astraflow.transport.frames import source_lost
from astraflow.wire.transfers import TransferBound

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class Tasks:
    """Runs coroutines whose failure concerns nobody else; a defect is logged."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    async def close(self) -> None:
        while running := list(self._running):
            for task in running:
                task.cancel()
            await asyncio.wait(running)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a lane's task failed through a defect", exc_info=error)


# linux/tcp.h; the socket module of Python 3.11 has no names for some of them.
_TCP_USER_TIMEOUT: Final = 18
_TCP_NOTSENT_LOWAT: Final = 25
# struct tcp_info: rtt, total_retrans, segs_out, delivery_rate.
_TCP_INFO: Final = struct.Struct("=68xI28xI32xI20xQ")
_SILENCE_S: Final = 20
_PROBE_S: Final = 5
_PROBE_COUNT: Final = 4
_USER_TIMEOUT_MS: Final = 30_000
LONG_WAY_US: Final = 2000
"""Round trips from here on are those of a network between sites."""

_CONGESTION_CONTROL: Final = b"bbr"

# A connection takes the next part when the last one is nearly gone: fast ones take more.
_UNSENT_NBYTES: Final = 64 << 10


@contextmanager
def kept(sock: socket.socket) -> Generator[socket.socket]:
    """Keep a socket that the block makes ready; one that it fails with is closed."""
    with ExitStack() as undo:
        undo.callback(sock.close)
        yield sock
        undo.pop_all()


async def connect(
    protocol: asyncio.BaseProtocol, family: int, place: "tuple[Any, ...] | str"
) -> socket.socket:
    """Connect a protocol over a tuned socket, and return that."""
    loop = asyncio.get_running_loop()
    with kept(socket.socket(family, socket.SOCK_STREAM)) as sock:
        tune(sock)
        await loop.sock_connect(sock, place)
        await loop.create_connection(lambda: protocol, sock=sock)
    return sock


def tune(sock: socket.socket) -> None:
    """Send at once; find out about a dead peer within half a minute."""
    sock.setblocking(False)
    if sock.family == socket.AF_UNIX:
        # The least there is, some headers: what they announce lies in memory until it is read.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    with suppress(OSError, AttributeError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENCE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBE_COUNT)
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)


def tune_for_long_way(sock: socket.socket) -> None:
    """Choose what keeps a long link full: BBR where the kernel lets us, and a short queue.

    BBR holds its rate through random loss and through silence (facts of this kernel:
    `tcp_slow_start_after_idle` does not apply to it), where others start anew.
    """
    with suppress(OSError, AttributeError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _CONGESTION_CONTROL)
    with suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _UNSENT_NBYTES)


class TcpInfo(NamedTuple):
    """What the kernel knows of a connection.

    Attributes:
        round_trip_us: Estimated.
        repeat_count: Packets that had to be sent again.
        packet_count: All, since it stands.
        bytes_per_s: At which it delivered of late.
    """

    round_trip_us: int = 0
    repeat_count: int = 0
    packet_count: int = 0
    bytes_per_s: int = 0


def tcp_info(sock: socket.socket) -> TcpInfo:
    """Return what the kernel tells; zeros where it tells nothing."""
    try:
        data = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except (OSError, AttributeError):
        return TcpInfo()
    return TcpInfo(*_TCP_INFO.unpack(data)) if len(data) == _TCP_INFO.size else TcpInfo()


class SocketConnection:
    """A stream socket as a connection of a lane; see `groups.Connection`."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    async def send(self, buffers: Sequence[bytes | memoryview]) -> None:
        left, loop = self.send_some(buffers), asyncio.get_running_loop()
        while left:
            await _ready(self.sock, loop.add_writer, loop.remove_writer)
            left = self.send_some(left)

    def send_some(self, buffers: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
        views = [memoryview(each) for each in buffers if len(each)]
        with suppress(BlockingIOError):
            while views:
                sent = self.sock.sendmsg(views)
                while views and sent >= len(views[0]):
                    sent -= len(views.pop(0))
                if sent:
                    views[0] = views[0][sent:]
        return [*views]

    async def receive(self, nbytes: int) -> bytes:
        buffer = bytearray(nbytes)
        view = memoryview(buffer)
        while view:
            got = await asyncio.get_running_loop().sock_recv_into(self.sock, view)
            if not got:
                raise EOFError
            view = view[got:]
        return bytes(buffer)

    def end(self) -> None:
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.sock.close()


async def readable(sock: socket.socket) -> None:
    """Return when something can be received, if only the end."""
    loop = asyncio.get_running_loop()
    await _ready(sock, loop.add_reader, loop.remove_reader)


async def _ready(
    sock: socket.socket, add: Callable[..., None], remove: Callable[[int], object]
) -> None:
    ready = asyncio.Event()
    # The number, not the socket: a loop that does not know it yet would describe it in an error.
    descriptor = sock.fileno()
    add(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        remove(descriptor)


NEAR_CONNECTION_COUNT: Final = 4
FAR_CONNECTION_COUNT: Final = 96

# An answer that took longer came from another site, or over a connection that was made for it.
_FAR_ANSWER_S: Final = 0.02
_NBYTES_PER_CONNECTION: Final = 32 << 10

_MAX_PORT: Final = 65_535


def connection_count(bound: TransferBound | None, answer_s: float) -> int:
    """Return how many connections a transfer is worth.

    Every connection begins with ten packets per round trip and doubles them in each, and its
    window ends at what the kernel's limits allow: many fill a long link sooner and further.
    """
    most = FAR_CONNECTION_COUNT if answer_s > _FAR_ANSWER_S else NEAR_CONNECTION_COUNT
    if bound is None:
        return most
    return max(1, min(most, bound.payload_nbytes // _NBYTES_PER_CONNECTION))


def direct_port(port: int) -> int:
    """Return where a source has its TCP lane unless it says otherwise: one above gRPC's."""
    return port % _MAX_PORT + 1


async def is_this_machine(host: str) -> bool:
    """Whether a host is this machine: then what it is reached by is also what it is reached from.

    Connecting a datagram socket sends nothing.
    """
    loop = asyncio.get_running_loop()
    try:
        places = await loop.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, place = places[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)
            return bool(probe.getsockname()[0] == place[0])
    except (OSError, UnicodeError):
        return False


async def tcp_dial(
    host: str, port: int
) -> Callable[[asyncio.BaseProtocol], Coroutine[Any, Any, socket.socket]]:
    """Return what connects to a host, which is looked up once for all connections to it."""
    loop = asyncio.get_running_loop()
    try:
        places = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise source_lost(f"{host} is not known: {why}") from error
    family, _, _, _, place = places[0]
    return lambda connection: connect(connection, family, place)


def tcp_listener(host: str, ports: Sequence[int]) -> socket.socket:
    """Return a socket that is bound to the first of some ports that is free.

    Raises:
        AstraflowError: INVALID_FIELD when none is.
    """
    failure: OSError | None = None
    for port in ports:
        try:
            family, kind, protocol, _, place = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            with kept(socket.socket(family, kind, protocol)) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(place)
        except OSError as error:
            failure = error
        else:
            return listener
    where, why = join_address(host, ports[-1]), failure and failure.strerror
    raise AstraflowError(
        Reason.INVALID_FIELD, f"the TCP lane cannot listen on {where}: {why}"
    ) from failure
