"""Pushes bytes to a receiver of the published lane: parallel streams, then one ZMQ message."""

import asyncio
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import zmq
import zmq.asyncio
from pydantic import Field

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.gateway.legacy.frames import PUSH_ACK, PUSH_HEAD
from astraflow.gateway.requests import Fields
from astraflow.rpc.peers import DialRules

_STREAMS = 4
_MOST_PORTS = 64
_LEAST_NBYTES = 1 << 20
_LINGER_MS = 5000


class Instance(Fields):
    """A receiver, as it registers."""

    sglang_http_host: str
    sglang_http_port: int = Field(ge=0, lt=1 << 16)
    session_ids: list[str] = Field(
        min_length=1, max_length=_MOST_PORTS, description="host:port[:port ...] of its pushes."
    )
    buffer_ptr: int = Field(default=0, description="Not used: pushes name offsets.")
    buffer_length: int = Field(ge=0)
    zmq_endpoint: str = Field(description="Host, or tcp://host[:port], of its completion message.")
    zmq_port: int = Field(ge=0, lt=1 << 16)
    handshake_ports: tuple[int, ...] = Field(default=(), strict=False)
    sender_group_index: int = 0

    @property
    def instance_id(self) -> str:
        """What /request_transfer names."""
        return f"{self.sglang_http_host}:{self.sglang_http_port}"

    async def target(self, dial: DialRules) -> "Target":
        """Return where it is dialled.

        Raises:
            AstraflowError: INVALID_FIELD for an address that is none or that may not be dialled,
                SOURCE_UNREACHABLE for a name without one.
        """
        pushes: list[tuple[str, int]] = []
        for session in self.session_ids:
            host, *ports = session.split(":")
            pushes += [await _resolved("session_ids", host, port, dial) for port in ports or [""]]
        if len(pushes) > _MOST_PORTS:
            raise _invalid("session_ids", f"{len(pushes)} ports are more than {_MOST_PORTS}")
        host, _, port = self.zmq_endpoint.removeprefix("tcp://").partition(":")
        message = await _resolved("zmq_endpoint", host, port or str(self.zmq_port), dial)
        return Target(name=self.instance_id, pushes=tuple(pushes), message=message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a receiver is dialled: addresses that were looked up and allowed, and ports.

    Attributes:
        name: As it is called.
        pushes: Of its listeners.
        message: Of its ZMQ socket.
    """

    name: str
    pushes: tuple[tuple[str, int], ...]
    message: tuple[str, int]


async def _resolved(field: str, host: str, port: str, dial: DialRules) -> tuple[str, int]:
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 1 << 16:
        raise _invalid(field, f"port {port[:20]!r} of {host[:200]} is none")
    [address, *_] = await dial.addresses(host, int(port))
    return address, int(port)


def _invalid(field: str, why: str) -> AstraflowError:
    return AstraflowError(Reason.INVALID_FIELD, f"{field}: {why}", metadata={"field": field})


class Pusher:
    """Sends transfers; one ZMQ context serves all.

    Attributes:
        receivers: By policy and instance id. A receiver registers once, with the first sender that
            it is told of, and pulls from every later one.
    """

    def __init__(self, *, timeout_s: float) -> None:
        """Prepare.

        Args:
            timeout_s: For one transfer.
        """
        self.receivers: dict[tuple[PolicyId, str], Target] = {}
        self._timeout_s = timeout_s
        self._context = zmq.asyncio.Context()

    async def __aenter__(self) -> Self:
        """Return it."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        self._context.destroy(linger=0)

    async def send(self, target: Target, payload: np.ndarray) -> None:
        """Push all of a payload, u8[n], and say that it is there.

        Nothing is said of one that failed: the receiver, which has the answer to its request, would
        take the message for that of its next transfer.

        Raises:
            AstraflowError: SOURCE_UNREACHABLE, SOURCE_TIMEOUT.
        """
        try:
            async with asyncio.timeout(self._timeout_s), asyncio.TaskGroup() as group:
                for address, start, stop in _shares(target.pushes, len(payload)):
                    group.create_task(_push(address, start, payload[start:stop].data))
        except TimeoutError:
            raise AstraflowError(
                Reason.SOURCE_TIMEOUT, f"a transfer took more than {self._timeout_s:g} s"
            ) from None
        except BaseExceptionGroup as errors:
            why = f"{target.name} took no transfer: {errors.exceptions[0]}"
            raise AstraflowError(Reason.SOURCE_UNREACHABLE, why) from None
        await self._tell(target)

    async def _tell(self, target: Target) -> None:
        messages: Any = self._context.socket(zmq.PUSH)
        messages.setsockopt(zmq.LINGER, _LINGER_MS)
        messages.setsockopt(zmq.IPV6, 1)
        try:
            messages.connect(f"tcp://{_url_host(target.message[0])}:{target.message[1]}")
            await messages.send_multipart([b"0", b"0"])
        finally:
            messages.close()


def _url_host(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _shares(
    addresses: Sequence[tuple[str, int]], nbytes: int
) -> list[tuple[tuple[str, int], int, int]]:
    """Share a payload out over streams, and those over the receiver's ports."""
    count = max(1, min(_STREAMS * len(addresses), nbytes // _LEAST_NBYTES))
    edges = [nbytes * i // count for i in range(count + 1)]
    return [(addresses[i % len(addresses)], edges[i], edges[i + 1]) for i in range(count)]


async def _push(address: tuple[str, int], offset: int, payload: memoryview) -> None:
    """Push one stream.

    Raises:
        OSError: The receiver cannot be reached.
        ConnectionError: It did not say that it has everything.
    """
    loop = asyncio.get_running_loop()
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await loop.sock_connect(connection, address)
        await loop.sock_sendall(connection, PUSH_HEAD.pack(offset, len(payload)))
        await loop.sock_sendall(connection, payload)
        if await loop.sock_recv(connection, 1) != PUSH_ACK:
            raise ConnectionError(f"{address[0]}:{address[1]} did not acknowledge a push")
