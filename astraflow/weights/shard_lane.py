"""ShardLane: a version of which every rank of a trainer serves its own shard, from all of them."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.layout import Layout
from astraflow.core.versions import CodecProfile, Source
from astraflow.transport.lanes import Lanes
from astraflow.wire.patches import SentChunk
from astraflow.wire.transfers import SentItem, TransferPlan, TransferSpec

_BETWEEN: Final = ","


def is_of_shards(endpoint: str) -> bool:
    """Whether an endpoint is that of several ranks."""
    return _BETWEEN in endpoint


def joined(sources: Iterable[Source]) -> list[Source]:
    """Return sources of which those of one trainer's ranks are one; without all ranks, none."""
    ranks: dict[tuple[object, ...], dict[int, Source]] = {}
    for each in sources:
        owner = each.member_id if each.shard_count > 1 else each.address
        ranks.setdefault((each.kind, owner, each.shard_count), {})[each.shard_rank] = each
    return [_one(found) for (_, _, count), found in ranks.items() if len(found) == count]


def _one(ranks: Mapping[int, Source]) -> Source:
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
        """Pull over lanes, which the caller closes."""
        self._lanes = lanes

    async def get_layout(self, endpoint: str, digest: bytes, transfer_token: bytes) -> Layout:
        """Return a layout; every rank has it."""
        first, *_ = endpoint.split(_BETWEEN)
        return await self._lanes.get_layout(first, digest, transfer_token)

    async def pull(
        self, endpoint: str, spec: TransferSpec, transfer_token: bytes
    ) -> AsyncGenerator[SentItem]:
        """Yield the plan, then its chunks; see Lanes.

        Raises:
            AstraflowError: As `Lanes.pull`; PATCH_UNKNOWN when the ranks go different ways.
        """
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
    """Return what to ask for to go from version to version."""
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
