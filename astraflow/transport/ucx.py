"""The UCX lane: framed chunks over UCX, for fabrics that it knows and plain TCP beside them.

UCX has an event loop and thread of its own: its context is one per process, and of one loop. `ucxx`
where it is installed, else its predecessor `ucp`; both are extras.
"""

import asyncio
import importlib
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from contextlib import aclosing, closing, suppress
from functools import cache, partial
from threading import Thread
from typing import Any, Final, TypeVar

import numpy as np

from astraflow.codec.chunks import CHUNK_NBYTES
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.versions import LaneKind
from astraflow.rpc.address import join_address, split_address
from astraflow.transport.assembly import FrameInbox, source_lost
from astraflow.transport.frames import (
    HEADER_NBYTES,
    MAX_CALL_NBYTES,
    Frame,
    bad_frame,
    chunk_frames,
    failure_frame,
    pack,
    plan_parts,
    read_request,
    request,
    unpack,
    waiting_frame,
)
from astraflow.transport.handshake import (
    GREETING_NBYTES,
    HELLO_NBYTES,
    WELCOME_NBYTES,
    Channel,
    PullerHandshake,
    SourceHandshake,
    new_group,
)
from astraflow.transport.sockets import Tasks
from astraflow.transport.transfers import Transfer, Transfers
from astraflow.wire.transfers import (
    SentItem,
    TransferBound,
    TransferPlan,
    TransferSpec,
    Waiting,
)
from astraflow.wire.weights import SentChunk

Result = TypeVar("Result")

_MODULES: Final = ("ucxx", "ucp")
_TRUNCATED: Final = "Truncated"


class UcxThread:
    """Runs what talks UCX."""

    def __init__(self, ucx: Any) -> None:
        self.ucx = ucx
        self._loop = asyncio.new_event_loop()
        Thread(target=self._loop.run_forever, name="astraflow-ucx", daemon=True).start()

    def start(self, work: Coroutine[Any, Any, Result]) -> "asyncio.Future[Result]":
        """Run work over there; return its result over here."""
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


@cache
def ucx_thread() -> UcxThread:
    """Return the thread of this process.

    Raises:
        AstraflowError: LANE_UNAVAILABLE when UCX is not installed.
    """
    for name in _MODULES:
        try:
            return UcxThread(importlib.import_module(name))
        except ImportError:
            continue
    raise AstraflowError(
        Reason.LANE_UNAVAILABLE, "UCX is not installed: pip install 'astraflow[ucx]'"
    )


async def send_records(endpoint: Any, records: Sequence[bytes | memoryview]) -> None:
    """Send a frame as one message, or two.

    Raises:
        AstraflowError: SOURCE_UNREACHABLE.
    """
    try:
        # Messages of one tag arrive in the order in which they were begun.
        await asyncio.gather(
            *(endpoint.send(np.frombuffer(each, np.uint8)) for each in records if len(each))
        )
    except Exception as error:  # see `_failure`
        raise _failure(error) from error


async def receive_record(endpoint: Any, nbytes: int) -> bytes:
    """Receive a message of at most so many bytes; a shorter one ends in zeros.

    Raises:
        AstraflowError: CHUNK_INVALID when it is longer; SOURCE_UNREACHABLE.
    """
    record = np.zeros(nbytes, np.uint8)
    if nbytes:
        await receive_into(endpoint, record)
    return record.tobytes()


async def receive_header(endpoint: Any, channel: Channel) -> Frame:
    """Receive the header of a frame.

    Raises:
        AstraflowError: CHUNK_INVALID, SOURCE_UNREACHABLE.
    """
    record = await receive_record(endpoint, channel.record_nbytes(HEADER_NBYTES))
    return unpack(channel.opened(record))


async def receive_into(endpoint: Any, array: np.ndarray) -> None:
    """Receive a message into an array of bytes.

    Raises:
        AstraflowError: CHUNK_INVALID when it is longer; SOURCE_UNREACHABLE.
    """
    try:
        await endpoint.recv(array)
    except Exception as error:  # see `_failure`
        raise _failure(error) from error


def _failure(error: Exception) -> AstraflowError:
    """Return what an error of UCX means; its classes differ between the two modules."""
    if _TRUNCATED in type(error).__name__:
        return bad_frame("a message is longer than it said")
    return source_lost(f"the UCX endpoint failed: {error or type(error).__name__}")


_CONNECT_TIMEOUT_S: Final = 5.0

_Item = TransferPlan | SentChunk | AstraflowError | None


class UcxSession:
    """One UCX endpoint, kept warm from version to version; see StreamSession.

    Attributes:
        lane: UCX.
    """

    def __init__(
        self, thread: UcxThread, endpoint: Any, channel: Channel, *, stall_timeout_s: float
    ) -> None:
        self.lane = LaneKind.UCX
        self._channel = channel
        self._thread = thread
        self._endpoint = endpoint
        self._stall_timeout_s = stall_timeout_s
        self._items: asyncio.Queue[_Item] | None = None
        self._receiving: asyncio.Future[None] | None = None
        self.is_ended = False

    @property
    def is_idle(self) -> bool:
        """Whether it stands and another transfer can begin."""
        return not self.is_ended and self._items is None

    def begin(self, bound: TransferBound | None, plan: TransferPlan | None = None) -> None:
        """Expect a transfer; without a plan it comes in a frame. See StreamSession."""
        items = self._items = asyncio.Queue[_Item]()
        loop = asyncio.get_running_loop()

        def post(item: _Item) -> None:
            with suppress(RuntimeError):  # The loop has been closed: nobody waits.
                loop.call_soon_threadsafe(items.put_nowait, item)

        self._receiving = self._thread.start(self._receive(bound, plan, post))

    def ask(self, spec: TransferSpec, secret: bytes) -> None:
        """Ask for a version; what fails shows in `items`."""
        frame = request(spec, partial(self._channel.prove, secret))
        self._thread.start(_send_quietly(self._endpoint, self._channel.sealed(_split(frame))))

    async def items(self) -> AsyncGenerator[TransferPlan | SentChunk]:
        """Yield the plan and the chunks of the transfer that began; see StreamSession."""
        items = self._items
        if items is None:
            raise source_lost("no transfer has begun")
        try:
            while (item := await items.get()) is not None:
                if isinstance(item, AstraflowError):
                    raise item
                yield item
            self._items = None
        finally:
            if self._items is not None:
                await self.close()

    async def close(self) -> None:
        self.is_ended = True
        if self._receiving is not None:
            self._receiving.cancel()
        await self._thread.start(abort(self._endpoint))

    async def _receive(
        self, bound: TransferBound | None, plan: TransferPlan | None, post: Any
    ) -> None:
        """Receive one transfer, in the thread of UCX."""
        inbox = FrameInbox(stall_timeout_s=self._stall_timeout_s, bound=bound)
        if plan is not None:
            inbox.take_plan(plan)
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(self._read(inbox))
            try:
                async for item in inbox.items():
                    post(item)
                post(None)
            except AstraflowError as error:
                post(error)
            finally:
                reading.cancel()

    async def _read(self, inbox: FrameInbox) -> None:
        try:
            while not inbox.is_over:
                frame = await receive_header(self._endpoint, self._channel)
                body = inbox.place(frame)
                if self._channel.is_sealed and len(body):
                    nbytes = self._channel.record_nbytes(len(body))
                    record = await receive_record(self._endpoint, nbytes)
                    self._channel.open_into(memoryview(record), body)
                elif len(body):
                    await receive_into(self._endpoint, np.frombuffer(body, np.uint8))
                inbox.filled(frame, body)
        except AstraflowError as error:
            inbox.fail(error)


async def open_ucx(
    address: str,
    plan: TransferPlan,
    *,
    bound: TransferBound | None,
    stall_timeout_s: float,
    must_seal: bool,
) -> UcxSession:
    """Connect to where a plan says, and begin its transfer.

    Raises:
        AstraflowError: SOURCE_UNREACHABLE; LANE_UNAVAILABLE without UCX, or when the source must
            seal, and does not.
    """
    thread = ucx_thread()
    handshake = PullerHandshake(LaneKind.UCX, new_group(), plan.token, must_seal=must_seal)
    endpoint = await thread.start(_connected(thread, *split_address(address), handshake))
    session = UcxSession(thread, endpoint, handshake.channel(), stall_timeout_s=stall_timeout_s)
    session.begin(bound, plan if plan.patches else None)
    return session


async def abort(endpoint: Any) -> None:
    """Close an endpoint without waiting for its peer."""
    endpoint.abort()


async def _connected(thread: UcxThread, host: str, port: int, handshake: PullerHandshake) -> Any:
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            endpoint = await thread.ucx.create_endpoint(host, port)
            greeting = await receive_record(endpoint, GREETING_NBYTES)
            await send_records(endpoint, [handshake.hello(greeting)])
            handshake.check(await receive_record(endpoint, WELCOME_NBYTES))
    except AstraflowError:
        raise
    except Exception as error:  # its classes differ between the two modules
        raise source_lost(f"no UCX endpoint at {host}:{port}: {error}") from error
    else:
        return endpoint


async def _send_quietly(endpoint: Any, records: Sequence[bytes | memoryview]) -> None:
    with suppress(AstraflowError):
        await send_records(endpoint, records)


def _split(frame: bytes) -> list[bytes]:
    return [frame[:HEADER_NBYTES], frame[HEADER_NBYTES:]]


_PIPELINE_COUNT: Final = 4
_MAX_UNPROVEN: Final = 64


class UcxHost:
    """Serves transfers over UCX endpoints, one after the other on each."""

    def __init__(self, transfers: Transfers, *, seals: bool = False) -> None:
        self._seals = seals
        self._unproven_count = 0
        self._transfers = transfers
        self._tasks = Tasks()
        self._listener: Any = None

    async def start(self, advertised_host: str) -> str:
        """Listen on all interfaces, as UCX does; return host:port, as others dial it.

        Raises:
            AstraflowError: LANE_UNAVAILABLE without UCX.
        """
        thread = ucx_thread()
        loop = asyncio.get_running_loop()

        async def accepted(endpoint: Any) -> None:
            with suppress(RuntimeError):  # The host is gone.
                loop.call_soon_threadsafe(lambda: self._tasks.start(self._serve(endpoint)))

        async def listen() -> Any:
            return thread.ucx.create_listener(accepted)

        self._listener = await thread.start(listen())
        return join_address(advertised_host, int(self._listener.port))

    async def close(self) -> None:
        await self._tasks.close()
        if self._listener is not None:
            await ucx_thread().start(_close(self._listener))
            self._listener = None

    async def _serve(self, endpoint: Any) -> None:
        thread = ucx_thread()
        try:
            with suppress(AstraflowError):
                await self._converse(endpoint)
        finally:
            await thread.start(abort(endpoint))

    async def _converse(self, endpoint: Any) -> None:
        transfer, channel = await self._welcomed(endpoint)
        sending = Tasks()
        try:
            with_plan = not transfer.plan.patches
            before = sending.start(self._send(endpoint, channel, transfer, with_plan=with_plan))
            while True:
                # A read that is always open finds a puller that leaves in mid-transfer.
                body = await ucx_thread().start(_read(endpoint, channel))
                await asyncio.wait([before])
                before = sending.start(self._answer(endpoint, channel, body))
        finally:
            await sending.close()

    async def _welcomed(self, endpoint: Any) -> tuple[Transfer, Channel]:
        """Return what the puller has planned, once both ends have proven its token."""
        thread, handshake = ucx_thread(), SourceHandshake(LaneKind.UCX, seals=self._seals)
        if self._unproven_count >= _MAX_UNPROVEN:
            raise AstraflowError(Reason.LANE_UNAVAILABLE, "too many endpoints have proven nothing")
        self._unproven_count += 1
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await thread.start(send_records(endpoint, [handshake.greeting]))
                hello = await thread.start(receive_record(endpoint, HELLO_NBYTES))
        except TimeoutError:
            raise AstraflowError(Reason.SOURCE_TIMEOUT, "the puller proves nothing") from None
        finally:
            self._unproven_count -= 1
        secret, transfer = self._transfers.claim(partial(handshake.is_proven, hello))
        welcome, channel = handshake.welcome(hello, secret)
        await thread.start(send_records(endpoint, [welcome]))
        return transfer, channel

    async def _answer(self, endpoint: Any, channel: Channel, body: bytes) -> None:
        known = self._transfers.secrets()
        try:
            spec = read_request(body, lambda proof, text: channel.is_proven(proof, text, known))
            transfer = self._transfers.open(spec)
        except AstraflowError as error:
            await self._fail(endpoint, channel, error)
        else:
            await self._send(endpoint, channel, transfer, with_plan=True)

    async def _send(
        self, endpoint: Any, channel: Channel, transfer: Transfer, *, with_plan: bool
    ) -> None:
        """Send a transfer; what fails on this side is told."""
        with closing(transfer):
            try:
                await self._send_items(endpoint, channel, transfer, with_plan=with_plan)
            except AstraflowError as error:
                await self._fail(endpoint, channel, error)

    async def _send_items(
        self, endpoint: Any, channel: Channel, transfer: Transfer, *, with_plan: bool
    ) -> None:
        under_way: deque[asyncio.Future[None]] = deque()
        async with aclosing(transfer.items()) as items:
            async for item in items:
                for frame in _frames(item, with_plan=with_plan):
                    records = channel.sealed(frame)
                    under_way.append(ucx_thread().start(send_records(endpoint, records)))
                if len(under_way) >= _PIPELINE_COUNT:
                    await under_way.popleft()
        await asyncio.gather(*under_way)

    async def _fail(self, endpoint: Any, channel: Channel, error: AstraflowError) -> None:
        records = channel.sealed(_split(failure_frame(error)))
        with suppress(AstraflowError):  # Who has left need not know.
            await ucx_thread().start(send_records(endpoint, records))


def _frames(item: SentItem, *, with_plan: bool) -> Iterator[Sequence[bytes | memoryview]]:
    if isinstance(item, Waiting):
        yield _split(waiting_frame())
    elif isinstance(item, SentChunk):
        yield from ([pack(frame), body] for frame, body in chunk_frames(item, CHUNK_NBYTES))
    elif with_plan:
        yield from plan_parts(item, CHUNK_NBYTES)


async def _read(endpoint: Any, channel: Channel) -> bytes:
    """Read the body of one frame of a puller; they are small."""
    frame = await receive_header(endpoint, channel)
    if frame.body_nbytes > MAX_CALL_NBYTES:
        raise bad_frame("it is larger than what a puller may send")
    record = await receive_record(endpoint, channel.record_nbytes(frame.body_nbytes))
    return channel.opened(record)


async def _close(listener: Any) -> None:
    listener.close()
