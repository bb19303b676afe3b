"""What chunks travel over: the lanes of a source, of several ranks at once, of an object store."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final, Protocol, runtime_checkable

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tensors import Layout
from astraflow.core.versions import CodecProfile, LaneKind, SourceInfo, VersionInfo
from astraflow.rpc.tls import Tls
from astraflow.transport.lanes import Lanes
from astraflow.weights.fetch.object_lane import ObjectLane
from astraflow.weights.patches.incoming import IncomingVersion
from astraflow.weights.patches.layout_frame import LayoutFrame
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


@runtime_checkable
class StandsReady(Protocol):
    """A lane over which the next version can be asked for before there is one."""

    async def stand_ready(self, endpoint: str, spec: TransferSpec, transfer_token: bytes) -> None:
        """Ask for the version that comes next, if the source can be asked so."""
        ...

    async def forget_ready(self, spec: TransferSpec) -> None:
        """Let go of what was asked for ahead and is older than what comes next."""
        ...


class PullListener(Protocol):
    """Who is told what a pull brings; `WeightRelay` is one."""

    def begin(self, incoming: IncomingVersion, frame: LayoutFrame) -> None: ...

    def note(self) -> None: ...


_BETWEEN: Final = ","


def is_of_shards(endpoint: str) -> bool:
    return _BETWEEN in endpoint


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


@dataclass(frozen=True, slots=True, eq=False)
class _Stream:
    """What one rank sends, and the plan that it began with."""

    items: AsyncGenerator[SentItem]
    plan: TransferPlan

    @property
    def way(self) -> list[tuple[int | None, int, CodecProfile]]:
        """From which version to which it leads, patch by patch, and how they are coded."""
        infos = [index.patch for index in self.plan.patches]
        return [(info.base_version, info.version, info.profile) for info in infos]


class ShardLane:
    """Pulls all shards of a version, each from its rank.

    Ranks plan for themselves. Where they would go different ways, all are asked to go from version
    to version.
    """

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes

    async def get_layout(self, endpoint: str, digest: bytes, transfer_token: bytes) -> Layout:
        first, *_ = endpoint.split(_BETWEEN)
        return await self._lanes.get_layout(first, digest, transfer_token)

    async def pull(
        self, endpoint: str, spec: TransferSpec, transfer_token: bytes
    ) -> AsyncGenerator[SentItem]:
        async with self._opened(endpoint, spec, transfer_token) as streams:
            if _agree(streams):
                yield _joined_plan(streams)
                async for sent in _chunks(streams):
                    yield sent
                return
        read: list[tuple[TransferPlan, list[SentChunk]]] = []
        for leg in _legs(spec):
            async with self._opened(endpoint, leg, transfer_token) as streams:
                if not _agree(streams):
                    raise _disagreed(leg)
                read.append((_joined_plan(streams), [sent async for sent in _chunks(streams)]))
        yield _added([plan for plan, _ in read])
        before = 0
        for plan, chunks in read:
            for sent in chunks:
                yield replace(sent, patch_index=before + sent.patch_index)
            before += len(plan.patches)

    @asynccontextmanager
    async def _opened(
        self, endpoint: str, spec: TransferSpec, transfer_token: bytes
    ) -> AsyncGenerator[list[_Stream]]:
        """Ask all ranks at once; close what they send at the end."""
        pulls = [
            self._lanes.pull(place, spec, transfer_token) for place in endpoint.split(_BETWEEN)
        ]
        beginning = [asyncio.ensure_future(_begun(each)) for each in pulls]
        try:
            yield await asyncio.gather(*beginning)
        finally:
            for each in beginning:
                each.cancel()
            await asyncio.gather(*beginning, return_exceptions=True)
            for each in pulls:
                await each.aclose()


async def _begun(items: AsyncGenerator[SentItem]) -> _Stream:
    async for item in items:
        if isinstance(item, TransferPlan):
            return _Stream(items, item)
    raise AstraflowError(Reason.SOURCE_UNREACHABLE, "a rank ended without a plan", retryable=True)


async def _chunks(streams: Sequence[_Stream]) -> AsyncGenerator[SentChunk]:
    """Yield the chunks of one rank after the other; what waits is on its way meanwhile."""
    for rank, stream in enumerate(streams):
        async for item in stream.items:
            if isinstance(item, SentChunk):
                yield replace(item, patch_index=item.patch_index * len(streams) + rank)


def _agree(streams: Sequence[_Stream]) -> bool:
    return all(stream.way == streams[0].way for stream in streams)


def _joined_plan(streams: Sequence[_Stream]) -> TransferPlan:
    """Return one plan: of each patch all shards, by rank, before the next."""
    plans = [stream.plan for stream in streams]
    by_patch = zip(*(plan.patches for plan in plans), strict=True)
    return replace(_added(plans), patches=tuple(index for shards in by_patch for index in shards))


def _added(plans: Sequence[TransferPlan]) -> TransferPlan:
    return TransferPlan(
        transfer_id=plans[0].transfer_id,
        patches=tuple(index for plan in plans for index in plan.patches),
        chunk_count=sum(plan.chunk_count for plan in plans),
        payload_nbytes=sum(plan.payload_nbytes for plan in plans),
    )


def _legs(spec: TransferSpec) -> list[TransferSpec]:
    if spec.base_version is None:
        raise _disagreed(spec)
    profiles = (CodecProfile.FAST,)
    return [
        replace(spec, base_version=version - 1, version=version, profiles=profiles)
        for version in range(spec.base_version + 1, spec.version + 1)
    ]


def _disagreed(spec: TransferSpec) -> AstraflowError:
    return AstraflowError(
        Reason.PATCH_UNKNOWN,
        f"the ranks go different ways from {spec.base_version} to version {spec.version}",
    )


class AnyLane:
    """Pulls from whatever address a source has: host:port, or a URI."""

    def __init__(
        self,
        *,
        tls: Tls | None = None,
        stall_timeout_s: float = 30.0,
        lanes: Sequence[LaneKind] | None = None,
        encrypts: bool | None = None,
    ) -> None:
        """Start without a connection.

        Args:
            tls: Of TransferServices; None: plain text.
            stall_timeout_s: A source that sends nothing for so long is given up.
            lanes: See Lanes.
            encrypts: See Lanes.
        """
        self._lanes = Lanes(
            tls=tls, stall_timeout_s=stall_timeout_s, lanes=lanes, encrypts=encrypts
        )
        self._shards = ShardLane(self._lanes)
        self._objects = ObjectLane(stall_timeout_s=stall_timeout_s)

    def pull(
        self, endpoint: str, spec: TransferSpec, transfer_token: bytes
    ) -> AsyncGenerator[SentItem]:
        return self._of(endpoint).pull(endpoint, spec, transfer_token)

    async def stand_ready(self, endpoint: str, spec: TransferSpec, transfer_token: bytes) -> None:
        """Ask for the version that comes next; see Lanes. Only one source sends it ahead."""
        if self._of(endpoint) is self._lanes:
            await self._lanes.stand_ready(endpoint, spec, transfer_token)

    async def forget_ready(self, spec: TransferSpec) -> None:
        await self._lanes.forget_ready(spec)

    async def get_layout(self, endpoint: str, digest: bytes, transfer_token: bytes) -> Layout:
        return await self._of(endpoint).get_layout(endpoint, digest, transfer_token)

    async def close(self) -> None:
        await self._lanes.close()
        await self._objects.close()

    def _of(self, endpoint: str) -> Lanes | ObjectLane | ShardLane:
        if "://" in endpoint:
            return self._objects
        return self._shards if is_of_shards(endpoint) else self._lanes
