"""The TCP lane: framed chunks over parallel connections that stay warm between versions."""

import asyncio
import socket
from collections.abc import Sequence
from typing import Final

from astraflow.core.errors import AstraflowError, Reason
from astraflow.rpc.address import join_address
from astraflow.transport.frames import source_lost
from astraflow.transport.sockets import connect, kept
from astraflow.transport.stream_session import Dial
from astraflow.wire.transfers import TransferPlan

NEAR_CONNECTION_COUNT: Final = 4
FAR_CONNECTION_COUNT: Final = 96

# A plan that took longer came from another site, or over a connection that was made for it.
_FAR_PLAN_S: Final = 0.02
_NBYTES_PER_CONNECTION: Final = 32 << 10

_MAX_PORT: Final = 65_535


def connection_count(plan: TransferPlan, plan_s: float) -> int:
    """Return how many connections a transfer is worth.

    Every connection begins with ten packets per round trip and doubles them in each, and its
    window ends at what the kernel's limits allow: many fill a long link sooner and further.
    """
    most = FAR_CONNECTION_COUNT if plan_s > _FAR_PLAN_S else NEAR_CONNECTION_COUNT
    if not plan.patches:
        return most
    return max(1, min(most, plan.payload_nbytes // _NBYTES_PER_CONNECTION))


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
    except OSError:
        return False


async def tcp_dial(host: str, port: int) -> Dial:
    """Return what connects to a host, which is looked up once for all connections to it."""
    loop = asyncio.get_running_loop()
    try:
        places = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise source_lost(f"{host} is not known: {error.strerror}") from error
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
