"""Sources: the connections that stand to each, and what was asked of it ahead."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Final

import structlog

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.versions import LaneKind
from astraflow.transport.progress import Progress
from astraflow.transport.stream_session import StreamSession
from astraflow.transport.ucx_lane import UcxSession
from astraflow.wire.transfers import SentItem, TransferPlan, TransferSpec, Waiting

_MAX_SOURCES: Final = 32

Session = StreamSession | UcxSession

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Ready:
    """A version that was asked for before there is one, and the session over which it comes."""

    spec: TransferSpec
    session: StreamSession

    def is_of(self, spec: TransferSpec) -> bool:
        """Whether this is what is wanted now."""
        fields = ("policy_id", "version", "base_version", "layout_digest")
        return all(getattr(self.spec, each) == getattr(spec, each) for each in fields)


@dataclass(slots=True, eq=False)
class Source:
    """What is known of one source.

    Attributes:
        sessions: That stand, or have ended.
        plain_until: Until then it has no lane but gRPC, by the monotonic clock.
        is_known: Whether it was asked before.
        ready: What was asked for ahead; None: nothing.
    """

    sessions: list[Session] = field(default_factory=list[Session])
    plain_until: float = 0.0
    is_known: bool = False
    ready: Ready | None = None


class Sources:
    """The last sources by endpoint; closes what stands to those that are pushed out."""

    def __init__(self) -> None:
        """Know none."""
        self._sources: dict[str, Source] = {}

    async def of(self, endpoint: str) -> Source:
        """Return a source; the one that was not used for longest makes room for a new one."""
        source = self._sources.pop(endpoint, None) or Source()
        self._sources[endpoint] = source
        source.sessions = [each for each in source.sessions if not each.is_ended]
        if len(self._sources) > _MAX_SOURCES:
            oldest = self._sources.pop(next(iter(self._sources)))
            for session in oldest.sessions:
                await session.close()
        return source

    async def stand_ready(self, endpoint: str, spec: TransferSpec, transfer_token: bytes) -> None:
        """Ask for the version that comes next, where TCP connections stand; else do nothing.

        The source sends it while it makes it; a later `pull` of it takes what has come.

        Args:
            endpoint: Of the source, host:port.
            spec: Of the version after the one that is held.
            transfer_token: Of the run.
        """
        await self.forget_ready(spec)
        source = await self.of(endpoint)
        if source.ready is not None:
            return
        for session in source.sessions:
            if (
                isinstance(session, StreamSession)
                and session.lane is LaneKind.TCP
                and session.is_idle
            ):
                ahead = replace(spec, is_ahead=True)
                session.begin()
                session.ask(ahead, transfer_token)
                source.ready = Ready(ahead, session)
                return

    async def forget_ready(self, spec: TransferSpec) -> None:
        """Let go of what was asked for ahead, if it has come another way, or will not come.

        Args:
            spec: Of what may come next.
        """
        for source in list(self._sources.values()):
            ready = source.ready
            if ready is None or ready.spec.policy_id != spec.policy_id:
                continue
            if ready.session.is_ended or ready.spec.version < spec.version:
                source.ready = None
                await ready.session.close()

    async def close(self) -> None:
        """Close all sessions."""
        sources, self._sources = self._sources, {}
        for source in sources.values():
            for session in source.sessions:
                await session.close()


async def sent_ahead(source: Source, progress: Progress) -> AsyncGenerator[SentItem]:
    """Yield what was asked for ahead, if that is what is wanted; nothing if it did not come.

    Raises:
        AstraflowError: What ended it once its plan was known; CHUNK_INVALID.
    """
    ready, spec = source.ready, progress.spec
    if ready is None or spec.version < ready.spec.version:
        return
    source.ready = None
    if not ready.is_of(spec):
        await ready.session.close()
        return
    try:
        async with aclosing(ready.session.items()) as items:
            async for item in items:
                if isinstance(item, TransferPlan):
                    yield Waiting(since_s=ready.session.since_s)
                yield item
    except AstraflowError as error:
        if progress.has_plan or error.reason is Reason.CHUNK_INVALID:
            raise
        log.info("nothing came ahead", version=spec.version, why=str(error))


async def asked(
    session: Session, spec: TransferSpec, transfer_token: bytes
) -> AsyncGenerator[SentItem]:
    """Ask for a version over connections that stand, and yield what comes."""
    session.begin()
    session.ask(spec, transfer_token)
    async with aclosing(session.items()) as items:
        async for item in items:
            yield item
