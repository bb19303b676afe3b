"""Serves the UCX lane."""

import asyncio
from collections import deque
from contextlib import aclosing, closing, suppress
from typing import Any, Final

import numpy as np

from astraflow.codec.chunks import CHUNK_NBYTES
from astraflow.core.errors import AstraflowError, Reason
from astraflow.rpc.address import join_address
from astraflow.transport.frames import (
    HEADER_NBYTES,
    MAX_CALL_NBYTES,
    Frame,
    FrameKind,
    bad_frame,
    chunk_frames,
    failure_frame,
    pack,
    plan_parts,
    read_request,
)
from astraflow.transport.stream_host import ClaimTransfer
from astraflow.transport.tasks import Tasks
from astraflow.transport.transfers import OpenTransfer, Secrets, Standing, Transfer
from astraflow.transport.ucx_lane import abort
from astraflow.transport.ucx_thread import receive_header, receive_into, send_frame, ucx_thread

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
        """Stop to listen and close all endpoints."""
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
        if isinstance(transfer, Standing):
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
