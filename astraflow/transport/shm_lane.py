"""The shared memory lane: a source on the same host writes into memory of the puller.

A local socket carries the frames; payloads lie in an arena, whose descriptor the puller sends
once it knows how much will come.
"""

import asyncio
import socket
from pathlib import Path
from typing import Final

from astraflow.core.errors import AstraflowError
from astraflow.core.versions import LaneKind
from astraflow.transport.arenas import Arena, ArenaPool, arena_nbytes
from astraflow.transport.frames import arena
from astraflow.transport.sockets import kept, tune
from astraflow.transport.stream_session import StreamSession
from astraflow.wire.transfers import TransferPlan

SOCKET_NAME: Final = "lane"
HOST_NAME: Final = "host"


def host_identity() -> bytes:
    """Return what tells this host, and this network namespace of it, from all others.

    Processes of one machine that are connected by an emulated link count as different hosts.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    return boot + b" " + str(Path("/proc/self/ns/net").stat().st_ino).encode()


def is_same_host(address: str) -> bool:
    """Whether a source's private directory can be read from here and names this host."""
    try:
        return (Path(address) / HOST_NAME).read_bytes() == host_identity()
    except OSError:
        return False


async def open_shm(
    address: str, plan: TransferPlan, *, pool: ArenaPool, stall_timeout_s: float
) -> StreamSession:
    """Connect to a source on this host and begin its transfer.

    Raises:
        AstraflowError: SOURCE_UNREACHABLE; LANE_UNAVAILABLE when there is no shared memory.
    """

    async def dial() -> socket.socket:
        with kept(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as sock:
            tune(sock)
            await asyncio.get_running_loop().sock_connect(sock, str(Path(address) / SOCKET_NAME))
        return sock

    def arena_for(session: StreamSession, known: TransferPlan) -> Arena:
        lent = pool.take(arena_nbytes(known))
        session.send_descriptor(arena(lent.nbytes), lent.descriptor)
        return lent

    # A source hands a transfer over once: without memory another lane must still find it.
    pool.take(arena_nbytes(plan))
    session = StreamSession(LaneKind.SHM, stall_timeout_s=stall_timeout_s, arena_for=arena_for)
    session.begin()
    await session.open(plan.token, dial)
    try:
        # Only now is there a connection over which the arena can go.
        session.take_plan(plan)
    except AstraflowError:
        await session.close()
        raise
    return session
