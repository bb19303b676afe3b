"""The TCP lane: framed chunks over parallel connections that stay warm between versions."""

import asyncio
import socket
from typing import Final

from astraflow.core.versions import Lane
from astraflow.rpc.address import split_address
from astraflow.transport.sockets import tune
from astraflow.transport.stream_session import StreamSession
from astraflow.wire.patches import TransferPlan

NEAR_CONNECTION_COUNT: Final = 4
FAR_CONNECTION_COUNT: Final = 32
# A plan that took longer came from another site, or over a connection that was made for it.
_FAR_PLAN_S: Final = 0.02
_NBYTES_PER_CONNECTION: Final = 64 << 10


def connection_count(plan: TransferPlan, plan_s: float) -> int:
    """Return how many connections a transfer is worth.

    Every connection begins with ten packets per round trip and doubles them in each, and its
    window ends at what the kernel's limits allow: many fill a long link sooner and further.

    Args:
        plan: Of the first transfer.
        plan_s: What it took to get it.
    """
    most = FAR_CONNECTION_COUNT if plan_s > _FAR_PLAN_S else NEAR_CONNECTION_COUNT
    return max(1, min(most, plan.payload_nbytes // _NBYTES_PER_CONNECTION))


async def open_tcp(
    address: str, plan: TransferPlan, *, count: int, stall_timeout_s: float
) -> StreamSession:
    """Connect to where a plan says, and begin its transfer.

    Raises:
        AstraflowError: SOURCE_UNREACHABLE; INVALID_FIELD for an address without a port.
    """
    host, port = split_address(address)

    async def dial() -> socket.socket:
        return await _dial(host, port)

    session = StreamSession(Lane.TCP, stall_timeout_s=stall_timeout_s)
    session.begin(plan)
    await session.open(plan.token, dial, count=count)
    return session


async def _dial(host: str, port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    places = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, place = places[0]
    sock = socket.socket(family, kind, protocol)
    try:
        tune(sock)
        await loop.sock_connect(sock, place)
    except BaseException:
        sock.close()
        raise
    return sock
