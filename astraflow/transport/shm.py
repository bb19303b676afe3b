"""The shared memory lane: a source on the same host writes into memory of the puller.

A local socket carries the frames; payloads lie in an arena, whose descriptor the puller sends
once it knows how much will come. The source can write into it at any time, so what it brought is
copied out before it is verified.
"""

import asyncio
import fcntl
import mmap
import os
import shutil
import socket
import sys
import tempfile
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Final, cast

import numpy as np
import psutil

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.versions import LaneKind
from astraflow.transport.assembly import Lend, TakePayload
from astraflow.transport.frames import Frame, FrameKind, bad_frame, chunk_frame, pack, source_lost
from astraflow.transport.groups import Carrier, Connection, Part, Transfers
from astraflow.transport.sockets import SocketConnection, connect, kept, readable
from astraflow.transport.stream_host import StreamHost
from astraflow.transport.stream_session import Dial, PullerConnection
from astraflow.wire.transfers import TransferBound, TransferPlan
from astraflow.wire.weights import SentChunk

SOCKET_NAME: Final = "lane"
HOST_NAME: Final = "host"
_MOST_IDENTITY_NBYTES: Final = 4096


def host_identity() -> bytes:
    """Return what tells this host, and this network namespace of it, from all others.

    Processes of one machine that are connected by an emulated link count as different hosts.
    """
    if sys.platform != "linux":
        raise AstraflowError(
            Reason.LANE_UNAVAILABLE, "the lane shm needs Linux; set lanes to [tcp]"
        )
    known = Path("/proc/sys/kernel/random/boot_id")
    if known.exists():
        boot = known.read_bytes().strip()
    else:
        # gVisor has none, and tells when it booted.
        boot = f"{socket.gethostname()} {int(psutil.boot_time())}".encode()
    return boot + b" " + bytes(Path("/proc/self/ns/net").readlink())


def is_same_host(address: str) -> bool:
    """Whether a source's private directory can be read from here and names this host.

    A source may name any place: of a pipe or a device the event loop would wait for ever.
    """
    named = Path(address) / HOST_NAME
    try:
        is_small = named.is_file() and named.stat().st_size < _MOST_IDENTITY_NBYTES
        return is_small and named.read_bytes() == host_identity()
    except (OSError, ValueError):  # No such place, or no path at all.
        return False


_ALIGNMENT: Final = 64


def aligned(nbytes: int) -> int:
    """Return a size with the gap behind it that lets the next payload begin well."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def arena_nbytes(most: TransferPlan | TransferBound) -> int:
    return aligned(most.payload_nbytes) + most.chunk_count * _ALIGNMENT


# What a large transfer brought is given back piece by piece, so that it is not there twice.
_WARM_NBYTES: Final = 64 << 20


class Arena:
    """Where a source puts the payloads of one transfer; its memory is reused after it."""

    def __init__(self, memory: "_Memory") -> None:
        # It closes the descriptor when it goes.
        self._memory = memory
        self.descriptor = memory.descriptor
        self.nbytes = memory.nbytes
        self._taken_nbytes = 0
        memory.user = weakref.ref(self)

    def payload(self, offset: int, nbytes: int) -> memoryview:
        """Copy a payload out of the arena; return a view of the copy, not to be written."""
        self._taken_nbytes += nbytes
        if not 0 <= offset <= offset + nbytes <= self.nbytes or self._taken_nbytes > self.nbytes:
            raise bad_frame("a payload lies outside of the arena")
        part = self._memory.shared[offset : offset + nbytes].copy()
        if self.nbytes > _WARM_NBYTES:
            self._memory.give_back(offset, nbytes)
        return part.data.toreadonly()


class ArenaPool:
    """Keeps the memory of the last transfer for the next, once that one is over.

    Its pages are warm, unless it is large: writing into fresh ones costs more than the copy.
    """

    def __init__(self) -> None:
        self._last: _Memory | None = None

    def take(self, nbytes: int) -> Arena:
        if self._last is None or self._last.nbytes < nbytes or self._last.user():
            try:
                self._last = _Memory(nbytes)
            except OSError as error:
                raise AstraflowError(
                    Reason.LANE_UNAVAILABLE,
                    f"the system gives no {nbytes} bytes of shared memory ({error.strerror}); free"
                    " some or raise the limits of memory, file size and open files",
                ) from error
        return Arena(self._last)


class _Memory:
    """Anonymous shared memory (memfd) of a fixed size; gone when both ends let go.

    It is sealed against shrinking, so that no peer can take pages away under a reader.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = max(nbytes, _ALIGNMENT)
        self.descriptor = os.memfd_create("astraflow", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, self.nbytes)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
        self._mapped = mmap.mmap(self.descriptor, self.nbytes)
        self.shared = np.frombuffer(self._mapped, np.uint8)
        self.user: Callable[[], object | None] = lambda: None

    def give_back(self, offset: int, nbytes: int) -> None:
        """Let the system have the pages that lie within some bytes."""
        first = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > first:
            # gVisor has no such call: there it is given back with the arena.
            with suppress(OSError):
                self._mapped.madvise(mmap.MADV_REMOVE, first, end - first)


def shm_dial(address: str, bound: TransferBound | None, pool: ArenaPool) -> tuple[Dial, Lend]:
    """Return what connects to a source on this host, and what lends it memory for a plan."""
    connected: list[socket.socket] = []

    async def dial(connection: PullerConnection) -> None:
        # Without memory for what is registered another lane is asked instead.
        if bound is not None:
            pool.take(arena_nbytes(bound))
        place = str(Path(address) / SOCKET_NAME)
        connected.append(await connect(connection, socket.AF_UNIX, place))

    def lend(plan: TransferPlan) -> TakePayload:
        lent = pool.take(arena_nbytes(plan))
        try:
            header = Frame(kind=FrameKind.ARENA, body_nbytes=0, body_offset=lent.nbytes)
            socket.send_fds(connected[0], [pack(header)], [lent.descriptor])
        except OSError as error:
            raise source_lost(f"the source is gone: {error}") from error
        return lent.payload

    return dial, lend


_PREFIX: Final = "astraflow-lane-"
# Longer than the one that is dialled: a path that is too long for that is too long for this.
_EARLY_NAME: Final = "early"
_ARENA_TIMEOUT_S: Final = 10.0

# Copying less than that takes less time than handing it to a thread.
_INLINE_NBYTES: Final = 256 << 10


class ShmHost(StreamHost):
    """Writes payloads into memory that pullers on this host lend it."""

    def __init__(self, transfers: Transfers) -> None:
        super().__init__(LaneKind.SHM, transfers, carrier=ArenaCarrier)
        self._directory: Path | None = None

    def start(self) -> str:
        """Listen in a directory that only this user can read; return its path.

        Raises:
            AstraflowError: LANE_UNAVAILABLE when there is no place for it.
        """
        parent = Path(tempfile.gettempdir())
        remove_stale(parent)
        try:
            self._directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            (self._directory / HOST_NAME).write_bytes(host_identity())
            with kept(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as listener:
                listener.bind(str(self._directory / _EARLY_NAME))
                self.listen(listener)
            # Only now: one that nobody listens on is a dead host's, for who starts beside this one.
            (self._directory / _EARLY_NAME).rename(self._directory / SOCKET_NAME)
        except OSError as error:
            why = error.strerror or error
            raise AstraflowError(
                Reason.LANE_UNAVAILABLE, f"no shared memory lane in {parent}: {why}"
            ) from error
        return str(self._directory)

    async def close(self) -> None:
        await super().close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


class ArenaCarrier(Carrier):
    """Writes payloads into the arena, and sends headers that say where."""

    is_prompt = True

    def __init__(self) -> None:
        super().__init__()
        self._arena: int | None = None
        # A thread may write while the group is closed: its descriptor must not be another's.
        self._writing = Lock()
        self._arrived = asyncio.Event()
        self._at = 0

    async def read_header(self, connection: Connection, nbytes: int) -> bytes:
        data, sock = b"", cast("SocketConnection", connection).sock
        while len(data) < nbytes:
            try:
                got, descriptors, _, _ = socket.recv_fds(sock, nbytes - len(data), 1)
            except BlockingIOError:
                await readable(sock)
                continue
            if not got:
                raise EOFError
            data += got
            self._take(descriptors)
        return data

    async def begin(self) -> None:
        try:
            async with asyncio.timeout(_ARENA_TIMEOUT_S):
                await self._arrived.wait()
        except TimeoutError:
            raise AstraflowError(
                Reason.SOURCE_TIMEOUT, "the puller sent no arena to write into"
            ) from None
        self._arrived.clear()
        self._at = 0

    async def parts(self, sent: SentChunk) -> Sequence[Part]:
        payload = sent.chunk.payload
        place, self._at = self._at, self._at + aligned(len(payload))
        if len(payload) > _INLINE_NBYTES:
            await asyncio.to_thread(self._write, payload, place)
        else:
            self._write(payload, place)
        return [[pack(chunk_frame(sent, body_nbytes=0, body_offset=place))]]

    def close(self) -> None:
        with self._writing:
            if self._arena is not None:
                os.close(self._arena)
                self._arena = None

    def _take(self, descriptors: Sequence[int]) -> None:
        for descriptor in descriptors:
            self.close()
            self._arena = descriptor
            self._arrived.set()

    def _write(self, payload: bytes | memoryview, place: int) -> None:
        """Write by a call: a mapping would fault if the puller took pages away."""
        view = memoryview(payload).cast("B")
        try:
            while view:
                with self._writing:
                    written = os.pwrite(-1 if self._arena is None else self._arena, view, place)
                view, place = view[written:], place + written
        except PermissionError as error:
            raise bad_frame("the chunks are larger than the arena for them") from error
        except OSError as error:
            raise AstraflowError(
                Reason.LANE_UNAVAILABLE, f"the arena cannot be written: {error.strerror}"
            ) from error


def remove_stale(parent: Path) -> None:
    """Remove what hosts that died left behind: directories in which nobody listens."""
    for directory in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(directory / SOCKET_NAME))
            except ConnectionRefusedError:
                shutil.rmtree(directory, ignore_errors=True)
