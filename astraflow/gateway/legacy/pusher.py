"""Pushes bytes to a receiver of the published lane: parallel streams, then one ZMQ message."""

import asyncio
import socket
from typing import Any, Self

import numpy as np
import zmq
import zmq.asyncio
from pydantic import Field

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.gateway.legacy.frames import PUSH_ACK, PUSH_HEAD
from astraflow.gateway.requests import Fields

_STREAMS = 4
_LEAST_NBYTES = 1 << 20
_LINGER_MS = 5000


class Instance(Fields):
    """A receiver, as it registers."""

    sglang_http_host: str
    sglang_http_port: int = Field(ge=0, lt=1 << 16)
    session_ids: list[str] = Field(min_length=1, description="host:port[:port ...] of its pushes.")
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

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Where pushes go.

        Raises:
            AstraflowError: INVALID_FIELD for a session id that is none.
        """
        found: list[tuple[str, int]] = []
        for session in self.session_ids:
            host, *ports = session.split(":")
            if not ports or not all(port.isdecimal() for port in ports):
                raise AstraflowError(
                    Reason.INVALID_FIELD, f"session id {session} is not host:port[:port ...]"
                )
            found += [(host, int(port)) for port in ports]
        return found

    @property
    def message_address(self) -> str:
        """Where the completion message goes."""
        given = self.zmq_endpoint.removeprefix("tcp://")
        return f"tcp://{given}" if ":" in given else f"tcp://{given}:{self.zmq_port}"


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
        self.receivers: dict[tuple[PolicyId, str], Instance] = {}
        self._timeout_s = timeout_s
        self._context = zmq.asyncio.Context()

    async def __aenter__(self) -> Self:
        """Return it."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        self._context.destroy(linger=0)

    async def send(self, instance: Instance, payload: np.ndarray) -> None:
        """Push all of a payload, u8[n], and say that it is there.

        Nothing is said of one that failed: the receiver, which has the answer to its request, would
        take the message for that of its next transfer.

        Raises:
            AstraflowError: SOURCE_UNREACHABLE, SOURCE_TIMEOUT.
        """
        try:
            async with asyncio.timeout(self._timeout_s), asyncio.TaskGroup() as group:
                for address, start, stop in _shares(instance.addresses, len(payload)):
                    group.create_task(_push(address, start, payload[start:stop].data))
        except TimeoutError:
            raise AstraflowError(
                Reason.SOURCE_TIMEOUT, f"a transfer took more than {self._timeout_s:g} s"
            ) from None
        except BaseExceptionGroup as errors:
            why = f"{instance.instance_id} took no transfer: {errors.exceptions[0]}"
            raise AstraflowError(Reason.SOURCE_UNREACHABLE, why) from None
        await self._tell(instance)

    async def _tell(self, instance: Instance) -> None:
        messages: Any = self._context.socket(zmq.PUSH)
        messages.setsockopt(zmq.LINGER, _LINGER_MS)
        try:
            messages.connect(instance.message_address)
            await messages.send_multipart([b"0", b"0"])
        finally:
            messages.close()


def _shares(
    addresses: list[tuple[str, int]], nbytes: int
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
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await loop.sock_connect(connection, address)
        await loop.sock_sendall(connection, PUSH_HEAD.pack(offset, len(payload)))
        await loop.sock_sendall(connection, payload)
        if await loop.sock_recv(connection, 1) != PUSH_ACK:
            raise ConnectionError(f"{address[0]}:{address[1]} did not acknowledge a push")
