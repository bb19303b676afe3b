"""BroadcastReceiver: takes what a trainer broadcasts, beside everything else that a node does."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import structlog

from astraflow.core.errors import AstraflowError
from astraflow.rpc.address import split_address
from astraflow.weights.broadcast import Frame, ReceiverMeetings, Rendezvous
from astraflow.weights.broadcast_frames import items
from astraflow.wire.transfers import SentItem

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class Inbox(Protocol):
    """Takes what comes, on the event loop."""

    def take(self, came: Sequence[SentItem], newest: int) -> None:
        """Take what a frame carries, and the newest version that is through."""
        ...

    def end(self) -> None:
        """Say that nothing more comes, until the next frame."""
        ...


class BroadcastReceiver:
    """Has a seat in one group after the other, in a thread of its own."""

    def __init__(self, where: Rendezvous) -> None:
        """Prepare.

        Args:
            where: The trainer broadcasts; the host is that of its weights.
        """
        self._where = where
        self._over = threading.Event()
        self._host = ""
        self._thread: threading.Thread | None = None

    def follow(self, endpoint: str, inbox: Inbox) -> None:
        """Begin to receive from the host of an endpoint; a later call tells where it is now."""
        self._host = split_address(endpoint)[0]
        if self._thread is None:
            loop = asyncio.get_running_loop()
            post = _Post(loop, inbox)
            self._thread = threading.Thread(
                target=self._run, args=(post,), name="astraflow-broadcast", daemon=True
            )
            self._thread.start()

    async def close(self) -> None:
        """Leave; it lasts until the next sign of life, or the deadline."""
        self._over.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _run(self, post: "_Post") -> None:
        while not self._over.is_set():
            try:
                meetings = ReceiverMeetings(
                    replace(self._where, host=self._host), self._over.is_set
                )
                while not self._over.is_set():
                    self._receive(meetings, post)
            except AstraflowError as error:
                if not self._over.is_set():
                    log.warning("no versions come by broadcast now", why=error.message)
            self._over.wait(1.0)

    def _receive(self, meetings: ReceiverMeetings, post: "_Post") -> None:
        group = meetings.meet()
        if group is None:
            return
        log.info("versions come by broadcast")
        try:
            while not self._over.is_set():
                post.take(group.receive())
        finally:
            post.end()


class _Post:
    """Hands frames over to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, inbox: Inbox) -> None:
        self._loop = loop
        self._inbox = inbox

    def take(self, frame: Frame) -> None:
        """Wait until a frame is taken: no more than one is on its way."""
        taking = self._take([*items(frame.body)], frame.number)
        asyncio.run_coroutine_threadsafe(taking, self._loop).result()

    def end(self) -> None:
        """Say that nothing more comes."""
        self._loop.call_soon_threadsafe(self._inbox.end)

    async def _take(self, came: Sequence[SentItem], newest: int) -> None:
        self._inbox.take(came, newest)
