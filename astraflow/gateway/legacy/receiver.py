"""Receives pushes of the published lane into a buffer, and the message that ends a transfer."""

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import numpy as np
import zmq
import zmq.asyncio

from astraflow.client.duplex import beside
from astraflow.core.errors import AstraflowError, Reason
from astraflow.gateway.legacy.frames import PUSH_ACK, PUSH_HEAD

_PIECE_NBYTES = 4 << 20
# Of a part of the message: a number.
_MESSAGE_NBYTES = 64


class Receiver:
    """One transfer's end: pushes may come over any number of connections at once.

    Attributes:
        buffer: u8[n], what is pushed.
        nbytes: Received so far.
        port: Of the pushes.
        message_port: Of the ZMQ message.
    """

    def __init__(
        self, buffer: np.ndarray, listener: socket.socket, messages: zmq.asyncio.Socket
    ) -> None:
        self.buffer = buffer
        self.nbytes = 0
        self.port: int = listener.getsockname()[1]
        self.message_port = 0
        self._listener = listener
        self._messages = messages

    async def serve(self) -> None:
        """Take connections until cancelled."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            while True:
                connection, _ = await loop.sock_accept(self._listener)
                group.create_task(self._take(connection))

    async def ended(self) -> None:
        """Wait for the message that ends the transfer.

        Raises:
            AstraflowError: SOURCE_UNREACHABLE when it says that the transfer failed.
        """
        parts = await self._messages.recv_multipart()
        if len(parts) != 2 or parts[1] != b"0":
            raise AstraflowError(
                Reason.SOURCE_UNREACHABLE, "the sender says that its transfer failed"
            )

    async def _take(self, connection: socket.socket) -> None:
        """Take pushes of a connection; one that lies outside of the buffer is not answered."""
        loop = asyncio.get_running_loop()
        connection.setblocking(False)
        with connection:
            head = bytearray(PUSH_HEAD.size)
            while await _fill(connection, memoryview(head)):
                offset, length = PUSH_HEAD.unpack(head)
                if offset + length > len(self.buffer):
                    return
                if not await _fill(connection, self.buffer[offset : offset + length].data):
                    return
                self.nbytes += length
                await loop.sock_sendall(connection, PUSH_ACK)


async def _fill(connection: socket.socket, view: memoryview) -> bool:
    """Receive until a view is full; False when the connection ended before."""
    loop, at = asyncio.get_running_loop(), 0
    while at < len(view):
        try:
            count = await loop.sock_recv_into(connection, view[at : at + _PIECE_NBYTES])
        except OSError:
            return False
        if not count:
            return False
        at += count
    return True


@asynccontextmanager
async def receiving(buffer: np.ndarray, host: str) -> AsyncGenerator[Receiver]:
    """Listen for a transfer until the end of the block.

    Args:
        buffer: u8[n].
        host: On which it listens.
    """
    context = zmq.asyncio.Context()
    try:
        with (
            socket.create_server((host, 0), backlog=64) as listener,
            context.socket(zmq.PULL) as messages,
        ):
            listener.setblocking(False)
            receiver = Receiver(buffer, listener, messages)
            messages.setsockopt(zmq.MAXMSGSIZE, _MESSAGE_NBYTES)
            receiver.message_port = messages.bind_to_random_port(f"tcp://{host}")
            async with beside(receiver.serve()):
                yield receiver
    finally:
        context.destroy(linger=0)
