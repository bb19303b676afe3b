"""A puller that has versions by broadcast.

A version that came by broadcast is one more source of it, asked before all others: its chunks are
verified as any others are, and what is missing or wrong comes from the next source.
"""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import structlog

from astraflow.config.recipe import Broadcast
from astraflow.core.errors import AstraflowError
from astraflow.core.tensors import WeightUpdate
from astraflow.core.versions import SourceInfo, SourceKind, SourceState, VersionInfo
from astraflow.rpc.address import split_address
from astraflow.weights.fetch.lanes import BROADCAST, AnyLane, BroadcastInbox, ListVersions
from astraflow.weights.fetch.puller import PullResult, WeightPuller
from astraflow.weights.publish.broadcast import ReceiverMeetings, items
from astraflow.wire.transfers import SentItem

_SOURCE: Final = SourceInfo(
    kind=SourceKind.RELAY, state=SourceState.LIVE, endpoint=BROADCAST, region=BROADCAST
)

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class BroadcastPuller:
    """A puller that takes what comes by broadcast first; see `WeightPuller`.

    The first version is pulled; who serves it as the origin is who broadcasts. From then on this
    has a seat in one group after the other, in a thread of its own.
    """

    def __init__(self, puller: WeightPuller, inbox: BroadcastInbox, settings: Broadcast) -> None:
        self._puller = puller
        self._inbox = inbox
        self._settings = settings
        self._over = threading.Event()
        self._host = ""
        self._thread: threading.Thread | None = None

    async def pull(
        self,
        target: VersionInfo,
        known: Mapping[int, VersionInfo],
        transfer_token: bytes,
        *,
        listed: ListVersions | None = None,
    ) -> PullResult:
        """Get a verified version, staged beside what is held; as `WeightPuller.pull`."""
        offered = target
        if await self._inbox.has(target.version):
            offered = replace(target, sources=(_SOURCE, *target.sources))
        pulled = await self._puller.pull(offered, known, transfer_token, listed=listed)
        self._inbox.forget(target.version)
        origins = [each for each in target.sources if each.kind is SourceKind.ORIGIN]
        if origins:
            self._follow(split_address(origins[0].endpoint)[0])
        return pulled

    def full_update(self) -> WeightUpdate:
        return self._puller.full_update()

    async def close(self) -> None:
        """Leave the group, which lasts until the next sign of life, or the deadline."""
        self._over.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        await self._puller.close()

    def _follow(self, host: str) -> None:
        """Receive from a host; a later call tells where the trainer is now."""
        self._host = host
        if self._thread is None:
            loop = asyncio.get_running_loop()
            self._thread = threading.Thread(
                target=self._run, args=(loop,), name="astraflow-broadcast", daemon=True
            )
            self._thread.start()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._over.is_set():
            try:
                meetings = ReceiverMeetings(self._settings, self._host, self._over.is_set)
                while not self._over.is_set():
                    self._receive(meetings, loop)
            except AstraflowError as error:
                if not self._over.is_set():
                    log.warning("no versions come by broadcast now", why=error.message)
            self._over.wait(1.0)

    def _receive(self, meetings: ReceiverMeetings, loop: asyncio.AbstractEventLoop) -> None:
        async def take(came: Sequence[SentItem], newest: int) -> None:
            self._inbox.take(came, newest)

        group = meetings.meet()
        if group is None:
            return
        log.info("versions come by broadcast")
        try:
            while not self._over.is_set():
                body, number = group.receive()
                # No more than one is on its way.
                taken = take([*items(body)], number)
                asyncio.run_coroutine_threadsafe(taken, loop).result()
        finally:
            loop.call_soon_threadsafe(self._inbox.end)


def broadcast_puller(
    settings: Broadcast, lane: AnyLane, pulling: Callable[..., WeightPuller]
) -> BroadcastPuller:
    """Return a puller that takes part in a group; `pulling` makes it, given the lane to others."""
    inbox = BroadcastInbox()
    lane.inbox = inbox
    return BroadcastPuller(pulling(lane=lane), inbox, settings)
