"""What a receiver has of a broadcast: an inbox, a lane that reads it, and a puller that uses both.

A version that came by broadcast is one more source of it, asked before all others: its chunks are
verified as any others are, and what is missing or wrong comes from the next source.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import structlog

from astraflow.config.recipe import Broadcast
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tensors import Layout, WeightUpdate
from astraflow.core.versions import SourceInfo, SourceKind, SourceState, VersionInfo
from astraflow.rpc.address import split_address
from astraflow.weights.fetch.lanes import AnyLane, ListVersions
from astraflow.weights.fetch.puller import PullResult, WeightPuller
from astraflow.weights.patches.patch import Patch
from astraflow.weights.publish.broadcast import ReceiverMeetings, items
from astraflow.wire.transfers import SentItem, TransferPlan, TransferSpec
from astraflow.wire.weights import SentChunk

ADDRESS: Final = "broadcast"

_SOURCE: Final = SourceInfo(
    kind=SourceKind.RELAY, state=SourceState.LIVE, endpoint=ADDRESS, region=ADDRESS
)

_KEPT_NBYTES: Final = 256 << 20


class BroadcastInbox:
    """Patches that came by broadcast, until they are pulled; used on one event loop.

    What comes while nobody pulls is kept as far as there is room, the newest in any case.
    """

    def __init__(self) -> None:
        self._arrived: dict[int, Patch] = {}
        self._coming: Patch | None = None
        self._newest: int | None = None
        self._changed = asyncio.Event()

    @property
    def is_open(self) -> bool:
        return self._newest is not None

    def take(self, came: Sequence[SentItem], newest: int) -> None:
        for item in came:
            if isinstance(item, TransferPlan) and len(item.patches) == 1:
                self._coming = Patch(item.patches[0])
                self._arrived[self._coming.info.version] = self._coming
            elif isinstance(item, SentChunk) and self._coming is not None:
                self._coming.add(item.chunk)
            else:
                raise AstraflowError(Reason.CHUNK_INVALID, "a broadcast sends one patch at a time")
        self._newest = newest
        self._evict()
        self._changed.set()

    def end(self) -> None:
        """Say that nothing more comes, until the next frame."""
        self._newest = self._coming = None
        self._changed.set()

    async def has(self, version: int) -> bool:
        while self._newest is not None and self._newest < version:
            self._changed.clear()
            await self._changed.wait()
        return version in self._arrived

    def forget(self, version: int) -> None:
        self._arrived = {each: kept for each, kept in self._arrived.items() if each > version}

    def way(self, base_version: int | None, version: int) -> list[Patch]:
        """Return the patches that lead from a base to a version, in order; chunks may lack."""
        way: list[Patch] = []
        at: int | None = version
        while at != base_version:
            arrived = None if at is None else self._arrived.get(at)
            if arrived is None:
                raise AstraflowError(
                    Reason.PATCH_UNKNOWN,
                    f"not all that leads from {base_version} to {version} came by broadcast",
                )
            way.insert(0, arrived)
            at = arrived.info.base_version
        return way

    def _evict(self) -> None:
        room_nbytes = _KEPT_NBYTES
        for version in sorted(self._arrived, reverse=True)[1:]:
            room_nbytes -= self._arrived[version].info.payload_nbytes
            if room_nbytes < 0:
                del self._arrived[version]


class BroadcastLane:
    """Reads an inbox at its address, and any other source over its lanes."""

    def __init__(self, inbox: BroadcastInbox, lane: AnyLane) -> None:
        self._inbox = inbox
        self._lane = lane

    def pull(
        self, endpoint: str, spec: TransferSpec, transfer_token: bytes
    ) -> AsyncGenerator[SentItem]:
        if endpoint == ADDRESS:
            return self._read(spec)
        return self._lane.pull(endpoint, spec, transfer_token)

    async def get_layout(self, endpoint: str, digest: bytes, transfer_token: bytes) -> Layout:
        """Return a layout; it does not come by broadcast."""
        if endpoint == ADDRESS:
            raise AstraflowError(Reason.LAYOUT_UNKNOWN, "layouts do not come by broadcast")
        return await self._lane.get_layout(endpoint, digest, transfer_token)

    async def stand_ready(self, endpoint: str, spec: TransferSpec, transfer_token: bytes) -> None:
        """Ask for the version that comes next, unless it comes by itself."""
        if not self._inbox.is_open:
            await self._lane.stand_ready(endpoint, spec, transfer_token)

    async def forget_ready(self, spec: TransferSpec) -> None:
        await self._lane.forget_ready(spec)

    async def close(self) -> None:
        await self._lane.close()

    async def _read(self, spec: TransferSpec) -> AsyncGenerator[SentItem]:
        way = self._inbox.way(spec.base_version, spec.version)
        yield TransferPlan(
            transfer_id=ADDRESS,
            patches=tuple(patch.index for patch in way),
            chunk_count=sum(patch.info.chunk_count for patch in way),
            payload_nbytes=sum(patch.info.payload_nbytes for patch in way),
        )
        for number, patch in enumerate(way):
            for chunk in patch.chunks.values():
                yield SentChunk(patch_index=number, chunk=chunk)


class BroadcastPuller:
    """A puller that takes what comes by broadcast first; see `WeightPuller`.

    The first version is pulled; who serves it as the origin is who broadcasts.
    """

    def __init__(
        self, puller: WeightPuller, inbox: BroadcastInbox, receiver: "BroadcastReceiver"
    ) -> None:
        self._puller = puller
        self._inbox = inbox
        self._receiver = receiver

    async def pull(
        self,
        target: VersionInfo,
        known: Mapping[int, VersionInfo],
        transfer_token: bytes,
        *,
        listed: ListVersions | None = None,
    ) -> PullResult:
        """Get a verified version, staged beside what is held.

        Raises:
            PullFailed: As `WeightPuller.pull`.
        """
        offered = target
        if await self._inbox.has(target.version):
            offered = replace(target, sources=(_SOURCE, *target.sources))
        pulled = await self._puller.pull(offered, known, transfer_token, listed=listed)
        self._inbox.forget(target.version)
        origins = [each for each in target.sources if each.kind is SourceKind.ORIGIN]
        if origins:
            self._receiver.follow(origins[0].endpoint, self._inbox)
        return pulled

    def full_update(self) -> WeightUpdate:
        return self._puller.full_update()

    async def close(self) -> None:
        await self._receiver.close()
        await self._puller.close()


def broadcast_puller(
    settings: Broadcast, lane: AnyLane, pulling: Callable[..., WeightPuller]
) -> BroadcastPuller:
    """Return a puller that takes part in the group of a recipe.

    Args:
        settings: Of the group.
        lane: To all other sources.
        pulling: Makes the puller, given its lane.
    """
    inbox = BroadcastInbox()
    puller = pulling(lane=BroadcastLane(inbox, lane))
    return BroadcastPuller(puller, inbox, BroadcastReceiver(settings))


log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class BroadcastReceiver:
    """Has a seat in one group after the other, in a thread of its own."""

    def __init__(self, settings: Broadcast) -> None:
        self._settings = settings
        self._over = threading.Event()
        self._host = ""
        self._thread: threading.Thread | None = None

    def follow(self, endpoint: str, inbox: BroadcastInbox) -> None:
        """Begin to receive from the host of an endpoint; a later call tells where it is now."""
        self._host = split_address(endpoint)[0]
        if self._thread is None:
            loop = asyncio.get_running_loop()
            self._thread = threading.Thread(
                target=self._run, args=(loop, inbox), name="astraflow-broadcast", daemon=True
            )
            self._thread.start()

    async def close(self) -> None:
        """Leave; it lasts until the next sign of life, or the deadline."""
        self._over.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _run(self, loop: asyncio.AbstractEventLoop, inbox: BroadcastInbox) -> None:
        while not self._over.is_set():
            try:
                meetings = ReceiverMeetings(self._settings, self._host, self._over.is_set)
                while not self._over.is_set():
                    self._receive(meetings, loop, inbox)
            except AstraflowError as error:
                if not self._over.is_set():
                    log.warning("no versions come by broadcast now", why=error.message)
            self._over.wait(1.0)

    def _receive(
        self, meetings: ReceiverMeetings, loop: asyncio.AbstractEventLoop, inbox: BroadcastInbox
    ) -> None:
        async def take(came: Sequence[SentItem], newest: int) -> None:
            inbox.take(came, newest)

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
            loop.call_soon_threadsafe(inbox.end)
