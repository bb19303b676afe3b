"""The UCX lane: framed chunks over UCX, for fabrics that it knows and plain TCP beside them."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any, Final

import numpy as np

from astraflow.core.errors import AstraflowError
from astraflow.core.versions import LaneKind
from astraflow.rpc.address import split_address
from astraflow.transport.frames import HEADER_NBYTES, hello, request
from astraflow.transport.inbox import Inbox, source_lost
from astraflow.transport.ucx_thread import (
    UcxThread,
    receive_header,
    receive_into,
    send_frame,
    ucx_thread,
)
from astraflow.wire.patches import SentChunk
from astraflow.wire.transfers import TransferPlan, TransferSpec

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

    def begin(self, plan: TransferPlan | None = None) -> None:
        """Expect a transfer; without a plan it comes in a frame."""
        items = self._items = asyncio.Queue[_Item]()
        loop = asyncio.get_running_loop()

        def post(item: _Item) -> None:
            with suppress(RuntimeError):  # The loop has been closed: nobody waits.
                loop.call_soon_threadsafe(items.put_nowait, item)

        self._receiving = self._thread.start(self._receive(plan, post))

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
        """Close the endpoint."""
        self.is_ended = True
        if self._receiving is not None:
            self._receiving.cancel()
        await self._thread.start(abort(self._endpoint))

    async def _receive(self, plan: TransferPlan | None, post: Any) -> None:
        """Receive one transfer, in the thread of UCX."""
        inbox = Inbox(stall_timeout_s=self._stall_timeout_s)
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

    async def _read(self, inbox: Inbox) -> None:
        try:
            while not inbox.is_over:
                frame = await receive_header(self._endpoint)
                body = inbox.place(frame)
                if len(body):
                    await receive_into(self._endpoint, np.frombuffer(body, np.uint8))
                inbox.filled(frame, body)
        except AstraflowError as error:
            inbox.fail(error)


async def open_ucx(address: str, plan: TransferPlan, *, stall_timeout_s: float) -> UcxSession:
    """Connect to where a plan says, and begin its transfer.

    Raises:
        AstraflowError: SOURCE_UNREACHABLE; LANE_UNAVAILABLE without UCX.
    """
    thread = ucx_thread()
    endpoint = await thread.start(_connected(thread, *split_address(address), plan.token))
    session = UcxSession(thread, endpoint, stall_timeout_s=stall_timeout_s)
    session.begin(plan)
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
