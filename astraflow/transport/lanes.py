"""Lanes: pulls over the best lane that a source has, and goes on over gRPC when it breaks.

Preference: shared memory on one host, TCP, UCX where it is asked for, gRPC. The first transfer
from a source is planned over gRPC; its connections are kept, and later ones are asked for over
them: one round trip to the first byte, and windows that are open already.
"""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import Final

import structlog

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.layout import Layout
from astraflow.core.versions import LaneKind
from astraflow.rpc.tls import Tls
from astraflow.transport.arenas import ArenaPool
from astraflow.transport.frames import SourceError
from astraflow.transport.grpc_lane import GrpcLane
from astraflow.transport.progress import Progress
from astraflow.transport.shm_lane import is_same_host, open_shm
from astraflow.transport.sources import Session, Source, Sources, asked, sent_ahead
from astraflow.transport.tcp_lane import connection_count, open_directly, open_tcp
from astraflow.transport.traffic import received
from astraflow.transport.ucx_lane import open_ucx
from astraflow.wire.transfers import LaneEndpoint, SentItem, TransferPlan, TransferSpec

DEFAULT_LANES: Final = (LaneKind.SHM, LaneKind.TCP, LaneKind.GRPC)

# How long a source that has no lane but gRPC is not asked again.
_PLAIN_S: Final = 600.0
# Who listens where a source has its TCP lane as a rule, and does not answer, is another.
_DIRECT_PLAN_S: Final = 5.0

_NO_LANE: Final = frozenset({Reason.LANE_UNAVAILABLE, Reason.CAPABILITY_MISSING})
_BROKEN: Final = frozenset({Reason.SOURCE_UNREACHABLE, Reason.SOURCE_TIMEOUT, *_NO_LANE})

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class Lanes:
    """Pulls from any number of sources; takes the place of a GrpcLane."""

    def __init__(
        self,
        *,
        tls: Tls | None = None,
        stall_timeout_s: float = 30.0,
        lanes: Sequence[LaneKind] | None = None,
    ) -> None:
        """Start without a connection.

        Args:
            tls: Of gRPC; None: plain text. With TLS chunks travel over no lane that is in the
                clear: shared memory and gRPC only.
            stall_timeout_s: A source that sends nothing for so long is given up.
            lanes: In order of preference; None: shared memory, TCP, gRPC. gRPC is always there.
        """
        is_plain = tls is None or tls.is_plain
        self._lanes = [
            lane
            for lane in (DEFAULT_LANES if lanes is None else lanes)
            if lane is not LaneKind.GRPC and (is_plain or lane is LaneKind.SHM)
        ]
        self._stall_timeout_s = stall_timeout_s
        self._grpc = GrpcLane(tls=tls, stall_timeout_s=stall_timeout_s)
        self._arenas = ArenaPool()
        self._sources = Sources()

    async def pull(
        self, endpoint: str, spec: TransferSpec, transfer_token: bytes
    ) -> AsyncGenerator[SentItem]:
        """Yield the plan, then its chunks, as they arrive; Waiting between them.

        Args:
            endpoint: host:port of a TransferService.
            spec: What is wanted.
            transfer_token: Of the run.

        Raises:
            AstraflowError: What the source answered; SOURCE_UNREACHABLE, SOURCE_TIMEOUT when it
                did not, or not to the end, over any lane; CHUNK_INVALID for what cannot be.
        """
        progress = Progress(spec)
        try:
            async with aclosing(self._over_lanes(endpoint, progress, transfer_token)) as items:
                async for item in items:
                    yield progress.note(item)
        except AstraflowError as error:
            if not _is_broken(error):
                raise
            log.warning(
                "a lane broke, going on over gRPC",
                endpoint=endpoint,
                why=str(error),
                chunks_left=progress.missing_count,
            )
        if progress.is_over:
            return
        rest = self._grpc.pull(endpoint, progress.rest(), transfer_token)
        async with aclosing(rest) as items:
            async for item in items:
                resumed = progress.resume(received(LaneKind.GRPC, item))
                if resumed is not None:
                    yield resumed

    async def stand_ready(self, endpoint: str, spec: TransferSpec, transfer_token: bytes) -> None:
        """Ask a source for the version that comes next; see Sources."""
        await self._sources.stand_ready(endpoint, spec, transfer_token)

    async def forget_ready(self, spec: TransferSpec) -> None:
        """Let go of what was asked for ahead and came another way; see Sources."""
        await self._sources.forget_ready(spec)

    async def get_layout(self, endpoint: str, digest: bytes, transfer_token: bytes) -> Layout:
        """Return a layout; see GrpcLane."""
        return await self._grpc.get_layout(endpoint, digest, transfer_token)

    async def close(self) -> None:
        """Close all connections."""
        await self._sources.close()
        await self._grpc.close()

    async def _over_lanes(
        self, endpoint: str, progress: Progress, transfer_token: bytes
    ) -> AsyncGenerator[SentItem]:
        """Yield from a session that stands, else from a new one; nothing where there is none."""
        source = await self._sources.of(endpoint)
        async with aclosing(sent_ahead(source, progress)) as items:
            async for item in items:
                yield received(LaneKind.TCP, item)
        if progress.is_over:
            return
        warm = next((each for each in source.sessions if each.is_idle), None)
        if warm is not None:
            try:
                async with aclosing(asked(warm, progress.spec, transfer_token)) as items:
                    async for item in items:
                        yield received(warm.lane, item)
            except AstraflowError as error:
                # Connections that died in silence are made anew; a transfer that began goes on.
                if progress.has_plan or not _is_broken(error):
                    raise
            else:
                return
        session = await self._introduced(endpoint, source, progress.spec, transfer_token)
        session = session or await self._open(endpoint, source, progress.spec, transfer_token)
        if session is None:
            return
        source.sessions.append(session)
        async with aclosing(session.items()) as items:
            async for item in items:
                yield received(session.lane, item)

    async def _introduced(
        self, endpoint: str, source: Source, spec: TransferSpec, transfer_token: bytes
    ) -> Session | None:
        """Ask where a far source has its TCP lane as a rule; None: it is to be planned."""
        if LaneKind.TCP not in self._lanes or source.is_known:
            return None
        source.is_known = True
        try:
            session = await open_directly(
                endpoint, transfer_token, stall_timeout_s=self._stall_timeout_s
            )
            if session is not None:
                session.ask(spec, transfer_token)
                await session.wait_plan(_DIRECT_PLAN_S)
        except AstraflowError as error:
            if not (_is_broken(error) or error.reason is Reason.CHUNK_INVALID):
                raise
            return None
        return session

    async def _open(
        self, endpoint: str, source: Source, spec: TransferSpec, transfer_token: bytes
    ) -> Session | None:
        """Plan a transfer and pick it up over the best lane; None: gRPC is all there is."""
        if not self._lanes or time.monotonic() < source.plain_until:
            return None
        started = time.monotonic()
        try:
            plan = await self._grpc.plan_transfer(endpoint, spec, self._lanes, transfer_token)
        except AstraflowError as error:
            if error.reason not in _NO_LANE:
                raise
            source.plain_until = started + _PLAIN_S
            return None
        plan_s = time.monotonic() - started
        for place in self._reachable(plan):
            try:
                return await self._connect(place, plan, plan_s)
            except AstraflowError as error:
                log.warning("a lane cannot be reached", lane=place.lane, why=str(error))
        source.plain_until = started + _PLAIN_S
        with suppress(AstraflowError):
            await self._grpc.release_transfer(endpoint, plan.transfer_id, transfer_token)
        return None

    def _reachable(self, plan: TransferPlan) -> list[LaneEndpoint]:
        return [
            place
            for lane in self._lanes
            for place in plan.endpoints
            if place.lane is lane and (lane is not LaneKind.SHM or is_same_host(place.address))
        ]

    async def _connect(self, place: LaneEndpoint, plan: TransferPlan, plan_s: float) -> Session:
        match place.lane:
            case LaneKind.SHM:
                return await open_shm(
                    place.address, plan, pool=self._arenas, stall_timeout_s=self._stall_timeout_s
                )
            case LaneKind.TCP:
                return await open_tcp(
                    place.address,
                    plan,
                    count=connection_count(plan, plan_s),
                    stall_timeout_s=self._stall_timeout_s,
                )
            case LaneKind.UCX:
                return await open_ucx(place.address, plan, stall_timeout_s=self._stall_timeout_s)
            case _:
                raise AstraflowError(Reason.LANE_UNAVAILABLE, f"{place.lane} is not spoken here")


def _is_broken(error: AstraflowError) -> bool:
    """Whether it is the lane that failed; what the source answers it answers over any lane."""
    is_answer = isinstance(error, SourceError) and error.reason not in _NO_LANE
    return error.reason in _BROKEN and not is_answer
