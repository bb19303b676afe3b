"""Weights from a trainer's sender: a copy of them, fetched in full or as a delta."""

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import structlog
import zmq
import zmq.asyncio

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tensors import TensorUpdate
from astraflow.gateway.weight_buffer import PUSH_ACK, PUSH_HEAD, BufferPlan, apply_delta, read_plan
from astraflow.rpc.address import split_address
from astraflow.rpc.concurrency import beside
from astraflow.rpc.peers import DialRules, Peer
from astraflow.rpc.reading import JSON_NBYTES

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_PIECE_NBYTES = 4 << 20
# Of a part of the message that ends a transfer: a number.
_MESSAGE_NBYTES = 64


class SenderCopy:
    """Holds the bytes of one version, and moves on to what the sender says it has.

    A version counts as held when the sender named it before, in its answer and after: a label is
    the version of the bytes. Every call raises SOURCE_UNREACHABLE, SOURCE_TIMEOUT or what the
    sender answers.

    Attributes:
        changed: By the last transfer: i64[n], rising, elements of two bytes; None: all of it.
    """

    def __init__(self, peer: Peer, plan: BufferPlan, *, host: str, timeout_s: float) -> None:
        self.endpoint = peer.url.removeprefix("http://")
        self.plan = plan
        self.changed: np.ndarray | None = None
        self.nbytes = 0
        self._peer = peer
        self._host = host
        self._port = 0
        self._timeout_s = timeout_s
        self._flat = np.zeros(plan.nbytes, np.uint8)
        # The sender's number of what is in `_flat`; None: nothing sound.
        self._held: int | None = None

    @classmethod
    async def of(
        cls, endpoint: str, *, host: str, timeout_s: float, dial: DialRules
    ) -> "SenderCopy":
        """Ask a sender what its buffer holds; nothing is fetched. It dials back to `host`.

        Raises:
            AstraflowError: INVALID_FIELD for a host from which weights must not come in the clear.
        """
        if not dial.clear_weights:
            await dial.require_weights(*split_address(endpoint))
        async with AsyncExitStack() as undo:
            peer = await undo.enter_async_context(Peer(f"http://{endpoint}", dial))
            read = partial(read_plan, max_nbytes=dial.max_weights_nbytes)
            plan = await peer.get_parsed("/get_buffer_info", read, max_nbytes=JSON_NBYTES)
            copy = cls(peer, plan, host=host, timeout_s=timeout_s)
            # From here on it is the copy's.
            undo.pop_all()
        return copy

    async def close(self) -> None:
        """Let go of the sender."""
        await self._peer.__aexit__()

    @property
    def is_full(self) -> bool:
        """Whether the last transfer was a full one."""
        return self.changed is None

    def tensors(self) -> dict[str, np.ndarray]:
        """Return the bits of every tensor, by name."""
        return self.plan.views(self._flat)

    def updates(self, changed: np.ndarray | None = None) -> tuple[TensorUpdate, ...]:
        """Return all of every tensor, or what changed; see `BufferPlan.updates`."""
        return self.plan.updates(self._flat, changed)

    async def offered(self) -> int:
        """Return the version that the sender has."""
        return _number(await self._peer.ask_json("GET", "/get_capabilities"), "version")

    async def fetch(self, label: int) -> None:
        """Get the version that the sender calls `label`.

        Raises:
            AstraflowError: VERSION_NOT_SERVED when it has another one; what a transfer raises.
        """
        offered = await self._peer.ask_json("GET", "/get_capabilities")
        _require(_number(offered, "version"), label)
        is_delta = bool(
            self._held not in (None, label)
            and offered.get("delta_ready")
            and offered.get("delta_version") == label
            and offered.get("delta_base_version") == self._held
        )
        # Until all of it has come, and the sender still says so.
        self._held = None
        try:
            if is_delta:
                await self._fetch_delta(label, _number(offered, "delta_size_bytes"))
            else:
                await self._fetch_full(label)
        except AstraflowError as error:
            if not is_delta:
                raise
            log.warning("a delta did not come; all weights do", version=label, why=str(error))
            await self._fetch_full(label)
        _require(await self.offered(), label)
        self._held = label

    async def _fetch_full(self, label: int) -> None:
        nbytes = await self._fetch(self._flat, "full", label)
        if nbytes != len(self._flat):
            why = f"{nbytes} of {len(self._flat)} bytes of weights came"
            raise AstraflowError(Reason.CHUNK_INVALID, why)
        self.changed, self.nbytes = None, nbytes

    async def _fetch_delta(self, label: int, nbytes: int) -> None:
        delta = np.zeros(min(nbytes, self.plan.nbytes), np.uint8)
        received = await self._fetch(delta, "delta", label)
        self.changed = await asyncio.to_thread(apply_delta, self._flat, delta[:received])
        self.nbytes = received

    async def _fetch(self, buffer: np.ndarray, mode: str, label: int) -> int:
        """Have a transfer pushed into a buffer, u8[n], from its start on; return how much came."""
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                receiving(buffer, self._host) as receiver,
            ):
                asked = {"instance_id": await self._register(receiver), "mode": mode}
                fields = await self._peer.ask_json(
                    "POST", "/request_transfer", asked, timeout_s=self._timeout_s
                )
                if not fields.get("ok"):
                    # Whoever named it is told that it refuses; what it says is for this log.
                    said = str(fields.get("reason") or fields.get("error"))[:300]
                    told = {"sender": self.endpoint, "mode": mode}
                    log.warning("a sender refuses a transfer", why=said, **told)
                    why = f"the sender at {self.endpoint} refuses a {mode} transfer"
                    raise AstraflowError(Reason.SOURCE_UNREACHABLE, why)
                await receiver.ended()
                _require(_number(fields, "version"), label)
                return receiver.nbytes
        except TimeoutError:
            why = f"the {mode} transfer from {self.endpoint} took more than {self._timeout_s:g} s"
            raise AstraflowError(Reason.SOURCE_TIMEOUT, why) from None

    async def _register(self, receiver: "Receiver") -> str:
        """Say where pushes go; addresses count from 0, so that they are offsets.

        The name stays: published senders keep a socket for every one that they ever heard. They
        take no receiver whose buffer has another length than all weights, for a delta neither.
        """
        self._port = self._port or receiver.port
        fields = {
            "sglang_http_host": self._host,
            "sglang_http_port": self._port,
            "session_ids": [f"{self._host}:{receiver.port}"],
            "buffer_ptr": 0,
            "buffer_length": self.plan.nbytes,
            "zmq_endpoint": self._host,
            "zmq_port": receiver.message_port,
            "handshake_ports": [],
            "sender_group_index": 0,
        }
        await self._peer.ask_json("POST", "/register_sglang_instance", fields)
        return f"{self._host}:{self._port}"


def _number(fields: dict[str, Any], name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or not 0 <= value < 1 << 53:
        raise AstraflowError(Reason.SOURCE_UNREACHABLE, f"the sender says no number of {name}")
    return value


def _require(found: int, label: int) -> None:
    if found != label:
        why = f"the sender holds version {found}, not {label}; nothing was published"
        raise AstraflowError(Reason.VERSION_NOT_SERVED, why)


class Receiver:
    """One transfer's end: pushes may come over any number of connections at once."""

    def __init__(
        self, buffer: np.ndarray, listener: socket.socket, messages: zmq.asyncio.Socket, host: str
    ) -> None:
        listener.setblocking(False)
        messages.setsockopt(zmq.MAXMSGSIZE, _MESSAGE_NBYTES)
        self.nbytes = 0
        self.port: int = listener.getsockname()[1]
        self.message_port = messages.bind_to_random_port(f"tcp://{host}")
        self._buffer = buffer
        self._listener = listener
        self._messages = messages

    async def ended(self) -> None:
        """Wait for the message that ends the transfer."""
        parts = await self._messages.recv_multipart()
        if len(parts) != 2 or parts[1] != b"0":
            why = "the sender says that its transfer failed"
            raise AstraflowError(Reason.SOURCE_UNREACHABLE, why)

    async def serve(self) -> None:
        """Take connections until cancelled."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            while True:
                connection, _ = await loop.sock_accept(self._listener)
                group.create_task(self._take(connection))

    async def _take(self, connection: socket.socket) -> None:
        """Take pushes of a connection; one that lies outside of the buffer is not answered."""
        head = bytearray(PUSH_HEAD.size)
        with connection, suppress(OSError):
            while await _fill(connection, memoryview(head)):
                offset, length = PUSH_HEAD.unpack(head)
                if offset + length > len(self._buffer):
                    return
                if not await _fill(connection, self._buffer[offset : offset + length].data):
                    return
                self.nbytes += length
                await asyncio.get_running_loop().sock_sendall(connection, PUSH_ACK)


async def _fill(connection: socket.socket, view: memoryview) -> bool:
    """Receive until a view is full; False when the connection ended before."""
    loop, at = asyncio.get_running_loop(), 0
    while at < len(view):
        count = await loop.sock_recv_into(connection, view[at : at + _PIECE_NBYTES])
        if not count:
            return False
        at += count
    return True


@asynccontextmanager
async def receiving(buffer: np.ndarray, host: str) -> AsyncGenerator[Receiver]:
    """Listen on a host for a transfer into a buffer, u8[n], until the end of the block."""
    context = zmq.asyncio.Context()
    try:
        with (
            socket.create_server((host, 0), backlog=64) as listener,
            context.socket(zmq.PULL) as messages,
        ):
            receiver = Receiver(buffer, listener, messages, host)
            async with beside(receiver.serve()):
                yield receiver
    finally:
        context.destroy(linger=0)
