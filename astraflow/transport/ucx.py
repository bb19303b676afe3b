"""The UCX lane: framed chunks over UCX, for fabrics that it knows and plain TCP beside them.

UCX has an event loop and thread of its own: its context is one per process, and of one loop. `ucxx`
where it is installed, else its predecessor `ucp`; both are extras.
"""

import asyncio
import importlib
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import cache
from threading import Thread
from typing import Any, Final, TypeVar

import numpy as np

from astraflow.codec.chunks import CHUNK_NBYTES
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.versions import LaneKind
from astraflow.rpc.address import join_address, split_address
from astraflow.transport.assembly import source_lost
from astraflow.transport.frames import HEADER_NBYTES, bad_frame, unpack
from astraflow.transport.groups import Carrier, InlineCarrier
from astraflow.transport.handshake import (
    GREETING_NBYTES,
    WELCOME_NBYTES,
    Channel,
    PullerHandshake,
)
from astraflow.transport.stream_host import StreamHost
from astraflow.transport.stream_session import Dial, PullerConnection, SocketSession
from astraflow.transport.transfers import Transfers

Result = TypeVar("Result")

_MODULES: Final = ("ucxx", "ucp")
_TRUNCATED: Final = "Truncated"
_PIPELINE_COUNT: Final = 4


class UcxThread:
    """Runs what talks UCX."""

    def __init__(self, ucx: Any) -> None:
        self.ucx = ucx
        self._loop = asyncio.new_event_loop()
        Thread(target=self._loop.run_forever, name="astraflow-ucx", daemon=True).start()

    def start(self, work: Coroutine[Any, Any, Result]) -> "asyncio.Future[Result]":
        """Run work over there; return its result over here."""
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def call(self, work: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(work)


@cache
def ucx_thread() -> UcxThread:
    for name in _MODULES:
        try:
            return UcxThread(importlib.import_module(name))
        except ImportError:
            continue
    raise AstraflowError(
        Reason.LANE_UNAVAILABLE, "UCX is not installed: pip install 'astraflow[ucx]'"
    )


class UcxConnection:
    """A UCX endpoint as a connection of a lane; see `groups.Connection`.

    Each buffer is one message.
    """

    def __init__(self, endpoint: Any) -> None:
        self._thread = ucx_thread()
        self._endpoint = endpoint
        self._under_way: deque[asyncio.Future[Any]] = deque()

    async def send(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Send messages; four calls may be under way, in order."""
        self.post(buffers)
        while len(self._under_way) > _PIPELINE_COUNT:
            await _translated(self._under_way.popleft())

    def post(self, buffers: Sequence[bytes | memoryview]) -> None:
        async def send() -> None:
            # Messages of one tag arrive in the order in which they were begun.
            arrays = [np.frombuffer(each, np.uint8) for each in buffers if len(each)]
            await asyncio.gather(*map(self._endpoint.send, arrays))

        sending = self._thread.start(send())
        sending.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._under_way.append(sending)

    def send_some(self, buffers: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
        return [*buffers]

    async def receive(self, nbytes: int) -> bytes:
        """Receive a message of at most so many bytes; a shorter one ends in zeros."""
        record = np.zeros(nbytes, np.uint8)
        if nbytes:
            await self.receive_into(record)
        return record.tobytes()

    async def receive_into(self, array: np.ndarray) -> None:
        """Receive a message into u8[n]; see `receive`."""
        await _translated(self._thread.start(self._endpoint.recv(array)))

    def end(self) -> None:
        self._thread.call(self._endpoint.abort)

    def close(self) -> None:
        self.end()


async def _translated(work: "asyncio.Future[Any]") -> None:
    """Wait for what UCX does; the classes of its errors differ between the two modules."""
    try:
        await work
    except Exception as error:
        if _TRUNCATED in type(error).__name__:
            raise bad_frame("a message is longer than it said") from error
        why = str(error) or type(error).__name__
        raise ConnectionError(f"the UCX endpoint failed: {why}") from error


class UcxSession(SocketSession):
    """Receives over one UCX endpoint."""

    async def _greeted(self, dialled: Any, handshake: PullerHandshake) -> PullerConnection:
        connection = UcxConnection(dialled)
        try:
            greeting = await connection.receive(GREETING_NBYTES)
            await connection.send([handshake.hello(greeting)])
            handshake.check(await connection.receive(WELCOME_NBYTES))
        except BaseException:
            connection.end()
            raise
        return _UcxReader(self, connection, handshake.channel())


class _UcxReader:
    """Receives frame after frame for a session; see `stream_session.PullerConnection`."""

    def __init__(self, session: SocketSession, connection: UcxConnection, channel: Channel) -> None:
        self.closed = asyncio.Event()
        self.channel = channel
        self._session = session
        self._connection = connection
        self._may_read = asyncio.Event()
        self._may_read.set()
        self._reading = asyncio.create_task(self._read())

    def send(self, frame: Sequence[bytes]) -> None:
        self._connection.post(self.channel.sealed(frame))

    def hold(self, is_pressed: bool) -> None:
        if is_pressed:
            self._may_read.clear()
        else:
            self._may_read.set()

    def abort(self) -> None:
        self._reading.cancel()
        self._connection.end()
        self.closed.set()

    async def _read(self) -> None:
        try:
            while True:
                await self._may_read.wait()
                await self._receive()
        except AstraflowError as error:
            self._session.end(error)
        except ConnectionError as error:
            self._session.end(source_lost(str(error)))

    async def _receive(self) -> None:
        """Receive one frame, its body straight to where it belongs."""
        nbytes = self.channel.record_nbytes(HEADER_NBYTES)
        frame = unpack(self.channel.opened(await self._connection.receive(nbytes)))
        body = self._session.place(frame)
        if self.channel.is_sealed and len(body):
            record = await self._connection.receive(self.channel.record_nbytes(len(body)))
            self.channel.open_into(memoryview(record), body)
        elif len(body):
            await self._connection.receive_into(np.frombuffer(body, np.uint8))
        self._session.touch()
        self._session.filled(frame, body)


def ucx_dial(address: str) -> Dial:
    """Return what connects to host:port; LANE_UNAVAILABLE without UCX."""
    thread, (host, port) = ucx_thread(), split_address(address)

    async def dial() -> Any:
        try:
            return await thread.start(thread.ucx.create_endpoint(host, port))
        except Exception as error:  # its classes differ between the two modules
            raise ConnectionError(f"no UCX endpoint at {address}") from error

    return dial


class UcxHost(StreamHost):
    """Serves transfers over UCX endpoints."""

    def __init__(
        self,
        transfers: Transfers,
        *,
        carrier: Callable[[], Carrier] = lambda: InlineCarrier(CHUNK_NBYTES),
        seals: bool = False,
    ) -> None:
        super().__init__(LaneKind.UCX, transfers, carrier=carrier, seals=seals)
        self._listener: Any = None

    async def start(self, advertised_host: str) -> str:
        """Listen on all interfaces, as UCX does; return host:port, as others dial it.

        Raises:
            AstraflowError: LANE_UNAVAILABLE without UCX.
        """
        thread, loop = ucx_thread(), asyncio.get_running_loop()

        async def accepted(endpoint: Any) -> None:
            with suppress(RuntimeError):  # The host is gone.
                loop.call_soon_threadsafe(lambda: self._admit(UcxConnection(endpoint)))

        async def listen() -> Any:
            return thread.ucx.create_listener(accepted)

        self._listener = await thread.start(listen())
        return join_address(advertised_host, int(self._listener.port))

    async def close(self) -> None:
        await super().close()
        if self._listener is not None:
            ucx_thread().call(self._listener.close)
            self._listener = None
