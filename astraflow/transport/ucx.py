"""The UCX lane: framed chunks over UCX, for fabrics that it knows and plain TCP beside them.

UCX has an event loop and thread of its own: its context is one per process, and of one loop.
`ucxx` is an extra.
"""

import asyncio
import importlib
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import cache, partial
from threading import Thread
from typing import Any, Final, TypeVar

import numpy as np

from astraflow.codec.chunks import CHUNK_NBYTES
from astraflow.config.extras import install
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.versions import LaneKind
from astraflow.rpc.address import join_address, split_address
from astraflow.transport.frames import bad_frame
from astraflow.transport.groups import Carrier, Transfers
from astraflow.transport.stream_host import StreamHost
from astraflow.transport.stream_session import Dial, PullerConnection

Result = TypeVar("Result")

_TRUNCATED: Final = "Truncated"
_PIPELINE_COUNT: Final = 4
_BRIEF_NBYTES: Final = 128


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
    try:
        return UcxThread(importlib.import_module("ucxx"))
    except ImportError:
        why = f"UCX is not installed: {install('ucx')}"
        raise AstraflowError(Reason.LANE_UNAVAILABLE, why) from None


class UcxConnection(asyncio.Transport):
    """A UCX endpoint: a connection of a lane at its source, and the transport of a puller's.

    Each buffer is one message. For the source see `groups.Connection`; what is for a puller begins
    with `read_for`.
    """

    def __init__(self, endpoint: Any) -> None:
        super().__init__()
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
        await _translated(self._thread.start(self._endpoint.recv(array)))

    def end(self) -> None:
        self._thread.call(self._endpoint.abort)

    def close(self) -> None:
        self.end()

    def read_for(self, puller: PullerConnection) -> None:
        """Receive for a puller from now on, as asyncio's transports do."""
        self._puller = puller
        self._may_read = asyncio.Event()
        self._may_read.set()
        puller.connection_made(self)
        self._reading = asyncio.create_task(self._read())

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.post([memoryview(data)])

    def pause_reading(self) -> None:
        self._may_read.clear()

    def resume_reading(self) -> None:
        self._may_read.set()

    def abort(self) -> None:
        self._reading.cancel()
        self.end()
        self._puller.connection_lost(None)

    async def _read(self) -> None:
        try:
            while True:
                await self._may_read.wait()
                target = self._puller.get_buffer(-1)
                if len(target) <= _BRIEF_NBYTES:
                    # A message may be shorter: then it ends in zeros.
                    target[:] = bytes(len(target))
                await self.receive_into(np.frombuffer(target, np.uint8))
                self._puller.buffer_updated(len(target))
        except AstraflowError as error:
            self._puller.fail(error)
        except ConnectionError as error:
            self._puller.connection_lost(error)


async def _translated(work: "asyncio.Future[Any]") -> None:
    """Wait for what UCX does; its errors have classes of their own."""
    try:
        await work
    except Exception as error:
        if _TRUNCATED in type(error).__name__:
            raise bad_frame("a message is longer than it said") from error
        why = str(error) or type(error).__name__
        raise ConnectionError(f"the UCX endpoint failed: {why}") from error


def ucx_dial(address: str) -> Dial:
    """Return what connects to host:port; LANE_UNAVAILABLE without UCX."""
    thread, (host, port) = ucx_thread(), split_address(address)

    async def dial(connection: PullerConnection) -> None:
        try:
            endpoint = await thread.start(thread.ucx.create_endpoint(host, port))
        except Exception as error:  # of classes of its own
            raise ConnectionError(f"no UCX endpoint at {address}") from error
        UcxConnection(endpoint).read_for(connection)

    return dial


class UcxHost(StreamHost):
    """Serves transfers over UCX endpoints."""

    def __init__(self, transfers: Transfers, *, seals: bool = False) -> None:
        carrier = partial(Carrier, CHUNK_NBYTES)
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
