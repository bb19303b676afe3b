"""The UCX lane: framed chunks over UCX, for fabrics that it knows and plain TCP beside them.

UCX has an event loop and thread of its own: its context is one per process, and of one loop. `ucxx`
where it is installed, else its predecessor `ucp`; both are extras.
"""

import asyncio
import importlib
from collections import deque
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, closing, suppress
from functools import cache
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
    FrameKind,
    bad_frame,
    chunk_frames,
    failure_frame,
    hello,
    pack,
    plan_parts,
    read_request,
    request,
    unpack,
)
from astraflow.transport.sockets import Tasks
from astraflow.transport.stream_host import ClaimTransfer
from astraflow.transport.transfers import OpenTransfer, Secrets, StandingTransfer, Transfer
from astraflow.wire.transfers import TransferBound, TransferPlan, TransferSpec
from astraflow.wire.weights import SentChunk

Result = TypeVar("Result")

_MODULES: Final = ("ucxx", "ucp")
_TRUNCATED: Final = "Truncated"


class UcxThread:
    """Runs what talks UCX."""

    def __init__(self, ucx: Any) -> None:
        """Start the thread; it ends with the process."""
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


async def send_frame(endpoint: Any, header: bytes, body: bytes | memoryview = b"") -> None:
    """Send a frame as one message, or two.

    Raises:
        AstraflowError: SOURCE_UNREACHABLE.
    """
    try:
        # Messages of one tag arrive in the order in which they were begun.
        await asyncio.gather(
            *(endpoint.send(np.frombuffer(each, np.uint8)) for each in (header, body) if len(each))
        )
    except Exception as error:  # see `_failure`
        raise _failure(error) from error


async def receive_header(endpoint: Any) -> Frame:
    """Receive the header of a frame.

    Raises:
        AstraflowError: CHUNK_INVALID, SOURCE_UNREACHABLE.
    """
    header = np.empty(HEADER_NBYTES, np.uint8)
    await receive_into(endpoint, header)
    return unpack(header.data)


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

    def __init__(self, thread: UcxThread, endpoint: Any, *, stall_timeout_s: float) -> None:
        self.lane = LaneKind.UCX
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
        self._thread.start(_send_quietly(self._endpoint, request(spec, secret)))

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
                frame = await receive_header(self._endpoint)
                body = inbox.place(frame)
                if len(body):
                    await receive_into(self._endpoint, np.frombuffer(body, np.uint8))
                inbox.filled(frame, body)
        except AstraflowError as error:
            inbox.fail(error)


async def open_ucx(
    address: str, plan: TransferPlan, *, bound: TransferBound | None, stall_timeout_s: float
) -> UcxSession:
    """Connect to where a plan says, and begin its transfer.

    Raises:
        AstraflowError: SOURCE_UNREACHABLE; LANE_UNAVAILABLE without UCX.
    """
    thread = ucx_thread()
    endpoint = await thread.start(_connected(thread, *split_address(address), plan.token))
    session = UcxSession(thread, endpoint, stall_timeout_s=stall_timeout_s)
    session.begin(bound, plan)
    return session


async def abort(endpoint: Any) -> None:
    """Close an endpoint without waiting for its peer."""
    endpoint.abort()


async def _connected(thread: UcxThread, host: str, port: int, token: bytes) -> Any:
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            endpoint = await thread.ucx.create_endpoint(host, port)
            first = hello(token)
            await send_frame(endpoint, first[:HEADER_NBYTES], first[HEADER_NBYTES:])
    except AstraflowError:
        raise
    except Exception as error:  # its classes differ between the two modules
        raise source_lost(f"no UCX endpoint at {host}:{port}: {error}") from error
    else:
        return endpoint


async def _send_quietly(endpoint: Any, frame: bytes) -> None:
    with suppress(AstraflowError):
        await send_frame(endpoint, frame[:HEADER_NBYTES], frame[HEADER_NBYTES:])


_PIPELINE_COUNT: Final = 4


class UcxHost:
    """Serves transfers over UCX endpoints, one after the other on each."""

    def __init__(
        self, *, claim: ClaimTransfer, open_transfer: OpenTransfer, secrets: Secrets
    ) -> None:
        """Prepare; `start` serves.

        Args:
            claim: Hands over the transfer of a token, or raises.
            open_transfer: Opens another one for a puller whose endpoint stands.
            secrets: Of the run: who proves one may ask.
        """
        self._claim = claim
        self._open_transfer = open_transfer
        self._secrets = secrets
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
        frame, token = await self._read(endpoint)
        if frame.kind is not FrameKind.HELLO:
            raise bad_frame("an endpoint begins with a token")
        try:
            transfer = self._claimed(token)
        except AstraflowError as error:
            await self._fail(endpoint, error)
            raise
        sending = Tasks()
        try:
            before = sending.start(self._send(endpoint, transfer, with_plan=False))
            while True:
                # A read that is always open finds a puller that leaves in mid-transfer.
                _, body = await self._read(endpoint)
                await asyncio.wait([before])
                before = sending.start(self._answer(endpoint, body))
        finally:
            await sending.close()

    def _claimed(self, token: bytes) -> Transfer:
        transfer = self._claim(token)
        if isinstance(transfer, StandingTransfer):
            raise AstraflowError(Reason.LANE_UNAVAILABLE, "UCX sends what is planned already")
        return transfer

    async def _answer(self, endpoint: Any, body: bytes) -> None:
        try:
            transfer = self._open_transfer(read_request(body, self._secrets()))
        except AstraflowError as error:
            await self._fail(endpoint, error)
        else:
            await self._send(endpoint, transfer, with_plan=True)

    async def _send(self, endpoint: Any, transfer: Transfer, *, with_plan: bool) -> None:
        """Send a transfer; what fails on this side is told."""
        with closing(transfer):
            try:
                if with_plan:
                    for header, part in plan_parts(transfer.plan, CHUNK_NBYTES):
                        await ucx_thread().start(send_frame(endpoint, header, part))
                await self._send_chunks(endpoint, transfer)
            except AstraflowError as error:
                await self._fail(endpoint, error)

    async def _send_chunks(self, endpoint: Any, transfer: Transfer) -> None:
        under_way: deque[asyncio.Future[None]] = deque()
        async with aclosing(transfer.chunks()) as chunks:
            async for sent in chunks:
                for frame, body in chunk_frames(sent, CHUNK_NBYTES):
                    under_way.append(ucx_thread().start(send_frame(endpoint, pack(frame), body)))
                if len(under_way) >= _PIPELINE_COUNT:
                    await under_way.popleft()
        await asyncio.gather(*under_way)

    async def _fail(self, endpoint: Any, error: AstraflowError) -> None:
        frame = failure_frame(error)
        head, body = frame[:HEADER_NBYTES], frame[HEADER_NBYTES:]
        with suppress(AstraflowError):  # Who has left need not know.
            await ucx_thread().start(send_frame(endpoint, head, body))

    async def _read(self, endpoint: Any) -> tuple[Frame, bytes]:
        """Read one frame of a puller; they are small."""
        return await ucx_thread().start(_read(endpoint))


async def _read(endpoint: Any) -> tuple[Frame, bytes]:
    frame = await receive_header(endpoint)
    if frame.body_nbytes > MAX_CALL_NBYTES:
        raise bad_frame("it is larger than what a puller may send")
    body = np.empty(frame.body_nbytes, np.uint8)
    if frame.body_nbytes:
        await receive_into(endpoint, body)
    return frame, body.tobytes()


async def _close(listener: Any) -> None:
    listener.close()
