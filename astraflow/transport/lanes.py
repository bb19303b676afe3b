"""Lanes: pulls over the best lane that a source has, and goes on over gRPC when it breaks.

Preference: shared memory on one host, TCP, UCX where it is asked for, gRPC. The first transfer
from a source is planned over gRPC; its connections are kept, and later ones are asked for over
them: one round trip to the first byte, and windows that are open already.
"""

import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Final

import structlog

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tensors import Layout
from astraflow.core.versions import LaneKind
from astraflow.rpc.address import split_address
from astraflow.rpc.tls import Tls
from astraflow.transport.assembly import Lend
from astraflow.transport.frames import SourceError, source_lost
from astraflow.transport.grpc_lane import GrpcLane
from astraflow.transport.hosts import is_encrypted
from astraflow.transport.shm import ArenaPool, is_same_host, shm_dial
from astraflow.transport.sockets import (
    FAR_CONNECTION_COUNT,
    connection_count,
    direct_port,
    is_this_machine,
    tcp_dial,
)
from astraflow.transport.stream_session import Dial, StreamSession
from astraflow.transport.ucx import ucx_dial
from astraflow.wire.transfers import (
    ChunkSet,
    LaneEndpoint,
    SentItem,
    TransferBound,
    TransferPlan,
    TransferSpec,
    Waiting,
)
from astraflow.wire.weights import SentChunk

DEFAULT_LANES: Final = (LaneKind.SHM, LaneKind.TCP, LaneKind.GRPC)

RECEIVED_NBYTES: Final = Counter[str]()

_MAX_SOURCES: Final = 32

# How long a source that has no lane but gRPC is not asked again.
_PLAIN_S: Final = 600.0

# A source on this host writes all of a transfer into shared memory, however much of it is read.
_LARGE_NBYTES: Final = 64 << 20

# A firewall that drops what is for other ports costs so much, once.
_DIRECT_TIMEOUT_S: Final = 1.5
_NO_LANE: Final = frozenset({Reason.LANE_UNAVAILABLE, Reason.CAPABILITY_MISSING})
_BROKEN: Final = frozenset({Reason.SOURCE_UNREACHABLE, Reason.SOURCE_TIMEOUT, *_NO_LANE})

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class TransferProgress:
    """Notes plan and chunks of a transfer, so that another lane brings the rest."""

    def __init__(self, spec: TransferSpec) -> None:
        self.spec = spec
        self.plan: TransferPlan | None = None
        self._came: dict[int, set[int]] = {}

    @property
    def missing_count(self) -> int | None:
        """Chunks that have not come; None: it is not known."""
        return self.plan and self.plan.chunk_count - sum(map(len, self._came.values()))

    def note(self, lane: LaneKind, item: SentItem) -> SentItem:
        if isinstance(item, TransferPlan):
            self.plan = item
        elif isinstance(item, SentChunk):
            self._came.setdefault(item.patch_index, set()).add(item.chunk.header.index)
            RECEIVED_NBYTES[lane] += len(item.chunk.payload)
        return item

    def rest(self) -> TransferSpec:
        """Return what is still wanted."""
        if self.plan is None:
            return self.spec
        have = {each.root_digest: each for each in self.spec.have_chunks}
        for number, indexes in self._came.items():
            root = self.plan.patches[number].patch.root_digest
            before = have.get(root)
            if before is None or before.indexes:
                held = {index for run in before.indexes for index in run} if before else set[int]()
                have[root] = ChunkSet.of(root, held | indexes)
        return replace(self.spec, have_chunks=tuple(have.values()))

    def resume(self, plan: TransferPlan) -> None:
        """Go on by the plan of another lane, if it is for the same patches."""
        plans = (self.plan or plan, plan)
        first, second = ([index.patch.root_digest for index in each.patches] for each in plans)
        if first != second:
            raise source_lost(
                "the lane broke, and the source no longer has the patches that it began with"
            )


@dataclass(slots=True, eq=False)
class SourceConnections:
    """What is known of one source.

    Attributes:
        sessions: That are kept.
        plain_until: Until then it has no lane but gRPC, by the monotonic clock.
        is_known: Whether it was asked before.
        ready: A version that was asked for before there is one, and over what it comes.
        user_count: Of pulls that are under way.
    """

    sessions: list[StreamSession] = field(default_factory=list[StreamSession])
    plain_until: float = 0.0
    is_known: bool = False
    ready: tuple[TransferSpec, StreamSession] | None = None
    user_count: int = 0


class Lanes:
    """Pulls from any number of sources; takes the place of a GrpcLane."""

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
            tls: Of gRPC; None: plain text.
            stall_timeout_s: A source that sends nothing for so long is given up.
            lanes: In order of preference; None: shared memory, TCP, gRPC. gRPC is always there.
            encrypts: Whether a source whose other lanes leave the host in the clear is asked over
                gRPC; None: with TLS.
        """
        self._must_seal = is_encrypted(encrypts, tls)
        self._lanes = [
            lane
            for lane in (DEFAULT_LANES if lanes is None else lanes)
            if lane is not LaneKind.GRPC
        ]
        self._stall_timeout_s = stall_timeout_s
        self._grpc = GrpcLane(tls=tls, stall_timeout_s=stall_timeout_s)
        self._arenas = ArenaPool()
        # By endpoint, the one that was used last comes last.
        self._sources: dict[str, SourceConnections] = {}

    async def pull(
        self, endpoint: str, spec: TransferSpec, transfer_token: bytes
    ) -> AsyncGenerator[SentItem]:
        """Yield the plan, then its chunks, as they arrive, over any lane; see `GrpcLane.pull`."""
        progress = TransferProgress(spec)
        async with self._source(endpoint) as source:
            over_lanes = self._over_lanes(endpoint, source, progress, transfer_token)
            async with aclosing(over_lanes) as items:
                async for item in items:
                    yield item
        if progress.missing_count == 0:
            return
        is_resumed = progress.plan is not None
        rest = self._grpc.pull(endpoint, progress.rest(), transfer_token)
        async with aclosing(rest) as items:
            async for item in items:
                if is_resumed and isinstance(item, TransferPlan):
                    is_resumed = False
                    progress.resume(item)
                else:
                    yield progress.note(LaneKind.GRPC, item)

    async def stand_ready(self, endpoint: str, spec: TransferSpec, transfer_token: bytes) -> None:
        """Ask for the version that comes next, where TCP connections stand; else do nothing.

        The source sends it while it makes it; a later `pull` of it takes what has come.
        """
        await self.forget_ready(spec)
        async with self._source(endpoint) as source:
            idle = [each for each in source.sessions if each.lane is LaneKind.TCP and each.is_idle]
            if idle and source.ready is None:
                source.ready = replace(spec, is_ahead=True), idle[0]
                idle[0].ask(source.ready[0], transfer_token)

    async def forget_ready(self, spec: TransferSpec) -> None:
        """Let go of what was asked for ahead, if it has come another way, or will not come."""
        for source in list(self._sources.values()):
            if source.ready is None or source.ready[0].policy_id != spec.policy_id:
                continue
            asked, session = source.ready
            if session.is_ended or asked.version < spec.version:
                source.ready = None
                await session.close()

    async def get_layout(self, endpoint: str, digest: bytes, transfer_token: bytes) -> Layout:
        return await self._grpc.get_layout(endpoint, digest, transfer_token)

    async def close(self) -> None:
        sources, self._sources = self._sources, {}
        for source in sources.values():
            for session in source.sessions:
                await session.close()
        await self._grpc.close()

    @asynccontextmanager
    async def _source(self, endpoint: str) -> AsyncGenerator[SourceConnections]:
        """Give a source; one that was not used for long makes room, one in use does not."""
        source = self._sources.pop(endpoint, None) or SourceConnections()
        self._sources[endpoint] = source
        source.sessions = [each for each in source.sessions if not each.is_ended]
        source.user_count += 1
        try:
            idle = [place for place, each in self._sources.items() if not each.user_count]
            excess = max(0, len(self._sources) - _MAX_SOURCES)
            for each in [self._sources.pop(place) for place in idle[:excess]]:
                for session in each.sessions:
                    await session.close()
            yield source
        finally:
            source.user_count -= 1

    async def _over_lanes(
        self,
        endpoint: str,
        source: SourceConnections,
        progress: TransferProgress,
        transfer_token: bytes,
    ) -> AsyncGenerator[SentItem]:
        """Yield from the first lane that works, and as far as it does; without one nothing."""
        for find in (self._asked_ahead, self._warm, self._introduced, self._listed):
            session = None
            try:
                session = await find(endpoint, source, progress.spec, transfer_token)
                if session is None:
                    continue
                async with aclosing(session.items()) as items:
                    async for item in items:
                        if isinstance(item, TransferPlan) and session.is_ahead:
                            yield Waiting(since_s=session.inbox and session.inbox.since_s)
                        yield progress.note(session.lane, item)
            except AstraflowError as error:
                is_early = session is not None and session.is_ahead and progress.plan is None
                if error.reason is Reason.CHUNK_INVALID or not (is_early or _is_broken(error)):
                    raise
                # What was asked for ahead may never become a version.
                report = log.info if is_early else log.warning
                report(
                    "a lane broke, going on over another",
                    endpoint=endpoint,
                    why=str(error),
                    chunks_left=progress.missing_count,
                )
            finally:
                if session is not None and session not in source.sessions:
                    await session.close()
            if progress.plan is not None:
                return

    async def _asked_ahead(
        self, _endpoint: str, source: SourceConnections, spec: TransferSpec, _token: bytes
    ) -> StreamSession | None:
        """Return over what the version comes, if it was asked for before there was one."""
        if source.ready is None or spec.version < source.ready[0].version:
            return None
        (asked, session), source.ready = source.ready, None
        fields = ("policy_id", "version", "base_version", "layout_digest")
        if any(getattr(asked, each) != getattr(spec, each) for each in fields):
            await session.close()
            return None
        return session

    async def _warm(
        self, _endpoint: str, source: SourceConnections, spec: TransferSpec, transfer_token: bytes
    ) -> StreamSession | None:
        """Ask over connections that stand; those that died in silence are made anew."""
        session = next((each for each in source.sessions if each.is_idle), None)
        if session is not None:
            session.ask(spec, transfer_token)
        return session

    async def _introduced(
        self, endpoint: str, source: SourceConnections, spec: TransferSpec, transfer_token: bytes
    ) -> StreamSession | None:
        """Ask where a far source has its TCP lane as a rule; None: it is to be listed."""
        if LaneKind.TCP not in self._lanes or source.is_known:
            return None
        source.is_known = True
        host, port = split_address(endpoint)
        if await is_this_machine(host):
            # Other lanes are better there.
            return None
        try:
            session = self._session(LaneKind.TCP, await tcp_dial(host, direct_port(port)))
            await session.open(
                transfer_token, count=FAR_CONNECTION_COUNT, timeout_s=_DIRECT_TIMEOUT_S
            )
        except AstraflowError as error:
            # Whoever else may listen there is not the source.
            if _is_broken(error) or error.reason is Reason.CHUNK_INVALID:
                return None
            raise
        session.ask(spec, transfer_token)
        source.sessions.append(session)
        return session

    async def _listed(
        self, endpoint: str, source: SourceConnections, spec: TransferSpec, transfer_token: bytes
    ) -> StreamSession | None:
        """Ask over the best lane that the source says it has; None: gRPC is all there is."""
        if not self._lanes or time.monotonic() < source.plain_until:
            return None
        started = time.monotonic()
        try:
            listed = await self._grpc.list_lanes(endpoint, transfer_token)
        except AstraflowError as error:
            if error.reason not in _NO_LANE:
                raise
            listed = []
        answer_s = time.monotonic() - started
        plain_s = _PLAIN_S
        places = self._reachable(listed, spec)
        for place in places:
            try:
                session = await self._connected(place, spec.bound, answer_s, transfer_token)
            except AstraflowError as error:
                log.warning("a lane cannot be reached", lane=place.lane, why=str(error))
                if error.reason is Reason.CHUNK_INVALID:
                    # What was answered there was damaged on its way: the next pull may fare better.
                    plain_s = 0.0
                continue
            if session.lane is LaneKind.SHM or places[-1].lane is not LaneKind.SHM:
                source.sessions.append(session)
            # Else what comes next is small again, and has a better lane.
            session.ask(spec, transfer_token)
            return session
        source.plain_until = started + plain_s
        return None

    def _reachable(self, listed: Sequence[LaneEndpoint], spec: TransferSpec) -> list[LaneEndpoint]:
        places = [
            place
            for lane in self._lanes
            for place in listed
            if place.lane is lane and (lane is not LaneKind.SHM or is_same_host(place.address))
        ]
        if spec.base_version is None and spec.bound and spec.bound.payload_nbytes > _LARGE_NBYTES:
            # So much of a model should not lie in memory a second time.
            places.sort(key=lambda place: place.lane is LaneKind.SHM)
        return places

    async def _connected(
        self, place: LaneEndpoint, bound: TransferBound | None, answer_s: float, secret: bytes
    ) -> StreamSession:
        count = 1
        match place.lane:
            case LaneKind.SHM:
                dial, lend = shm_dial(place.address, bound, self._arenas)
                session = self._session(place.lane, dial, lend)
            case LaneKind.TCP:
                session = self._session(place.lane, await tcp_dial(*split_address(place.address)))
                count = connection_count(bound, answer_s)
            case LaneKind.UCX:
                session = self._session(place.lane, ucx_dial(place.address))
            case _:
                raise AstraflowError(Reason.LANE_UNAVAILABLE, f"{place.lane} is not spoken here")
        await session.open(secret, count=count)
        return session

    def _session(self, lane: LaneKind, dial: Dial, lend: Lend = lambda _: None) -> StreamSession:
        must_seal = self._must_seal and lane is not LaneKind.SHM
        return StreamSession(
            lane, dial, stall_timeout_s=self._stall_timeout_s, must_seal=must_seal, lend=lend
        )


def _is_broken(error: AstraflowError) -> bool:
    """Whether it is the lane that failed; what the source answers it answers over any lane."""
    is_answer = isinstance(error, SourceError) and error.reason not in _NO_LANE
    return error.reason in _BROKEN and not is_answer
