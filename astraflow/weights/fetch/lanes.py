"""What chunks travel over: the lanes of a source, of several ranks at once, of an object store."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cached_property
from typing import Final, Protocol

from astraflow.codec.chunks import chunk_invalid
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tensors import Layout
from astraflow.core.versions import CodecProfile, SourceInfo, VersionInfo
from astraflow.transport.frames import source_lost
from astraflow.transport.lanes import Lanes
from astraflow.weights.fetch.object_lane import ObjectLane
from astraflow.weights.patches.incoming import IncomingVersion
from astraflow.weights.patches.layouts import ShardLayout
from astraflow.weights.patches.patch import Patch, cheapest_patches, plan_of
from astraflow.wire.transfers import SentItem, TransferPlan, TransferSpec
from astraflow.wire.weights import SentChunk


class ChunkLane(Protocol):
    """Over which chunks travel; `GrpcLane` and `Lanes` are such."""

    def pull(
        self, endpoint: str, spec: TransferSpec, transfer_token: bytes
    ) -> AsyncGenerator[SentItem]: ...

    async def get_layout(self, endpoint: str, digest: bytes, transfer_token: bytes) -> Layout: ...

    async def close(self) -> None: ...


ListVersions = Callable[[], Awaitable[Iterable[VersionInfo]]]
"""Asks the run for its versions as they are now; raises what it answers."""


class PullListener(Protocol):
    """Who is told what a pull brings; `WeightRelay` is one."""

    def begin(self, incoming: IncomingVersion, frame: ShardLayout) -> None: ...

    def note(self) -> None: ...


_BETWEEN: Final = ","

BROADCAST: Final = "broadcast"
"""Address of what came by broadcast."""

_KEPT_NBYTES: Final = 256 << 20


def joined(sources: Iterable[SourceInfo]) -> list[SourceInfo]:
    """Return sources of which those of one trainer's ranks are one; without all ranks, none."""
    ranks: dict[tuple[object, ...], dict[int, SourceInfo]] = {}
    for each in sources:
        owner = each.member_id if each.shard_count > 1 else each.address
        ranks.setdefault((each.kind, owner, each.shard_count), {})[each.shard_rank] = each
    return [_one(found) for (_, _, count), found in ranks.items() if len(found) == count]


def _one(ranks: Mapping[int, SourceInfo]) -> SourceInfo:
    sources = [ranks[rank] for rank in sorted(ranks)]
    if len(sources) == 1:
        return sources[0]
    return replace(
        sources[0],
        endpoint=_BETWEEN.join(each.address for each in sources),
        shard_count=1,
        goodput_bytes_per_s=sum(each.goodput_bytes_per_s for each in sources),
    )


_Stream = tuple[AsyncGenerator[SentItem], TransferPlan]
"""What one rank sends, and the plan that it began with."""


def _way(plan: TransferPlan) -> list[tuple[int | None, int, CodecProfile]]:
    """Return from which version to which a plan leads, patch by patch, and how they are coded."""
    infos = [index.patch for index in plan.patches]
    return [(info.base_version, info.version, info.profile) for info in infos]


async def _begun(items: AsyncGenerator[SentItem]) -> _Stream:
    async for item in items:
        if isinstance(item, TransferPlan):
            return items, item
    raise source_lost("a rank ended without a plan")


async def _chunks(streams: Sequence[_Stream]) -> AsyncGenerator[SentChunk]:
    """Yield the chunks of one rank after the other; what waits is on its way meanwhile."""
    for rank, (items, _) in enumerate(streams):
        async for item in items:
            if isinstance(item, SentChunk):
                yield replace(item, patch_index=item.patch_index * len(streams) + rank)


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
                raise chunk_invalid("a broadcast sends one patch at a time")
        self._newest, room_nbytes = newest, _KEPT_NBYTES
        for version in sorted(self._arrived, reverse=True)[1:]:
            room_nbytes -= self._arrived[version].info.payload_nbytes
            if room_nbytes < 0:
                del self._arrived[version]
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

    def way(self, base_version: int | None, version: int) -> tuple[Patch, ...]:
        """Return the patches that lead from a base to a version, in order; chunks may lack."""
        found = cheapest_patches(self._arrived.values(), base_version, version, lambda _: 1)
        if found is None:
            raise AstraflowError(
                Reason.PATCH_UNKNOWN,
                f"not all that leads from {base_version} to {version} came by broadcast",
            )
        return found[1]

    async def read(self, spec: TransferSpec) -> AsyncGenerator[SentItem]:
        """Yield the plan and the chunks of what came."""
        way = self.way(spec.base_version, spec.version)
        yield plan_of(way)
        for number, patch in enumerate(way):
            for chunk in patch.chunks.values():
                yield SentChunk(patch_index=number, chunk=chunk)


class AnyLane(Lanes):
    """Pulls from any address: host:port, those of all ranks, a URI, or what came by broadcast.

    Attributes:
        inbox: What comes by broadcast; None: nothing does.
    """

    inbox: BroadcastInbox | None = None

    @cached_property
    def _objects(self) -> ObjectLane:
        return ObjectLane(stall_timeout_s=self._stall_timeout_s)

    def pull(
        self, endpoint: str, spec: TransferSpec, transfer_token: bytes
    ) -> AsyncGenerator[SentItem]:
        if endpoint == BROADCAST and self.inbox is not None:
            return self.inbox.read(spec)
        if "://" in endpoint:
            return self._objects.pull(endpoint, spec, transfer_token)
        if _BETWEEN in endpoint:
            return self._all_ranks(endpoint, spec, transfer_token)
        return super().pull(endpoint, spec, transfer_token)

    async def get_layout(self, endpoint: str, digest: bytes, transfer_token: bytes) -> Layout:
        if endpoint == BROADCAST:
            raise AstraflowError(Reason.LAYOUT_UNKNOWN, "layouts do not come by broadcast")
        if "://" in endpoint:
            return await self._objects.get_layout(endpoint, digest, transfer_token)
        # Every rank has it.
        first = endpoint.split(_BETWEEN, maxsplit=1)[0]
        return await super().get_layout(first, digest, transfer_token)

    async def stand_ready(self, endpoint: str, spec: TransferSpec, transfer_token: bytes) -> None:
        """Ask one source for the version that comes next, unless it comes by itself."""
        comes = self.inbox is not None and self.inbox.is_open
        if not comes and "://" not in endpoint and _BETWEEN not in endpoint:
            await super().stand_ready(endpoint, spec, transfer_token)

    async def close(self) -> None:
        await super().close()
        await self._objects.close()

    async def _all_ranks(
        self, endpoint: str, spec: TransferSpec, transfer_token: bytes
    ) -> AsyncGenerator[SentItem]:
        """Pull all shards of a version, each from its rank.

        Ranks plan for themselves. Where they would go different ways, all are asked for what is
        coded fast: patches over several versions are compact, so that all go from version to
        version. Nor are they told what is here: each would choose by what is of its own.
        """
        for asked in (spec, replace(spec, profiles=(CodecProfile.FAST,), have_chunks=())):
            async with self._opened(endpoint, asked, transfer_token) as streams:
                plans = [plan for _, plan in streams]
                if all(_way(plan) == _way(plans[0]) for plan in plans):
                    # Of each patch all shards, by rank, before the next.
                    by_patch = zip(*(plan.patches for plan in plans), strict=True)
                    yield TransferPlan(
                        patches=tuple(index for shards in by_patch for index in shards),
                        chunk_count=sum(plan.chunk_count for plan in plans),
                        payload_nbytes=sum(plan.payload_nbytes for plan in plans),
                    )
                    async for sent in _chunks(streams):
                        yield sent
                    return
        raise AstraflowError(
            Reason.PATCH_UNKNOWN,
            f"the ranks go different ways from {spec.base_version} to version {spec.version}",
        )

    @asynccontextmanager
    async def _opened(
        self, endpoint: str, spec: TransferSpec, transfer_token: bytes
    ) -> AsyncGenerator[list[_Stream]]:
        """Ask all ranks at once; close what they send at the end."""
        pulls = [self.pull(place, spec, transfer_token) for place in endpoint.split(_BETWEEN)]
        beginning = [asyncio.ensure_future(_begun(each)) for each in pulls]
        try:
            yield await asyncio.gather(*beginning)
        finally:
            for each in beginning:
                each.cancel()
            await asyncio.gather(*beginning, return_exceptions=True)
            for each in pulls:
                await each.aclose()
