"""WeightPuller: a version, verified, staged beside what is held.

A receiver serves a version only when a verified patch met a verified base. Chunks are verified
by digests that add up to a root, and roots are taken from the run (VersionInfo) alone, never from
a source. The state that results is compared with the version's state digest. Whatever goes wrong,
what is held stays as it was.
"""

import asyncio
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Final

import structlog

from astraflow.codec.chunks import CHUNK_NBYTES
from astraflow.codec.rates import measured_rates
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.tensors import WeightUpdate
from astraflow.core.versions import SourceKind, SourceReport, VersionInfo
from astraflow.rpc.concurrency import to_the_end
from astraflow.rpc.tls import Tls
from astraflow.transport.assembly import UNPLANNED_NBYTES
from astraflow.transport.lanes import Lanes
from astraflow.weights.disk.copy import DiskCopy
from astraflow.weights.fetch.holding import Holding
from astraflow.weights.fetch.lanes import (
    AnyLane,
    ChunkLane,
    ListVersions,
    PullListener,
)
from astraflow.weights.fetch.sources import NO_WAY, Fetch, FetchSettings, SourceMemory
from astraflow.weights.patches.incoming import IncomingVersion, PipelinedDecoder
from astraflow.weights.patches.routes import payload_nbytes, steps
from astraflow.weights.patches.state import HeldState, stage
from astraflow.weights.serve.relay import WeightRelay
from astraflow.wire.transfers import TransferBound


@dataclass(frozen=True, slots=True, kw_only=True)
class PullTimes:
    """Where the time between a request and a staged version went.

    Attributes:
        verify: Of the pull: comparing digests of what came.
        decode: From the last chunk to the state of the version, decoded and verified.
        stage: From there until what the engine is to change lies ready.
    """

    verify: timedelta = timedelta()
    decode: timedelta = timedelta()
    stage: timedelta = timedelta()


@dataclass(frozen=True, slots=True, kw_only=True)
class PullResult:
    """A version that arrived.

    Attributes:
        update: What it asks of the engine.
        nbytes: Payload received and verified, from all sources.
        duration: First request to last chunk verified.
        reports: One per source tried.
        times: What else took its time.
    """

    update: WeightUpdate
    nbytes: int
    duration: timedelta
    reports: tuple[SourceReport, ...]
    times: PullTimes = field(default_factory=PullTimes)


class PullFailed(AstraflowError):  # noqa: N818 - it says what happened, as AstraflowError's reasons do
    """A version could not be had; what was held is held still.

    Attributes:
        reports: One per source tried.
    """

    def __init__(self, cause: AstraflowError, reports: tuple[SourceReport, ...]) -> None:
        others = [f"{each.address}: {each.failure.message}" for each in reports if each.failure]
        message = "; ".join(dict.fromkeys([cause.message, *others]))
        super().__init__(cause.reason, message, retryable=cause.retryable, metadata=cause.metadata)
        self.reports = reports


# Another way may be open where this one is not; a source that cannot be reached has none.
_BARRED: Final = NO_WAY | {
    Reason.DIGEST_MISMATCH,
    Reason.CHUNK_INVALID,
    Reason.SIGNATURE_INVALID,
}

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class WeightPuller:
    """Holds one policy's weights as a flat state and moves it from version to version."""

    def __init__(
        self,
        policy_id: PolicyId,
        *,
        tls: Tls | None = None,
        stall_timeout_s: float = 30.0,
        lane: ChunkLane | None = None,
        relay: WeightRelay | None = None,
        settings: FetchSettings | None = None,
        kinds: Collection[SourceKind] | None = None,
        copy: DiskCopy | None = None,
        progress: PullListener | None = None,
    ) -> None:
        """Start with nothing held.

        Args:
            policy_id: Whose weights.
            tls: Of the sources; as `stall_timeout_s` where no lane is given.
            stall_timeout_s: A source that sends nothing for so long is given up.
            lane: Over which chunks travel, closed with the puller; None: the best that there is.
            relay: Passes on what is pulled.
            settings: Of how sources are asked.
            kinds: Of the sources that are asked; None: all.
            copy: Keeps on disk what is held, and is closed with the puller.
            progress: Is told what comes.
        """
        self._progress = progress
        self._copy = copy
        self._policy_id = policy_id
        self._holding = Holding(policy_id, relay=relay, copy=copy)
        self._lane = lane or AnyLane(tls=tls, stall_timeout_s=stall_timeout_s)
        self._relay = relay
        self._settings = settings or FetchSettings()
        self._memory = SourceMemory(kinds, avoided_s=self._settings.avoided_s)
        self._one_at_a_time = asyncio.Lock()
        self._decoder = PipelinedDecoder(keeps_payloads=relay is not None)
        self._times = PullTimes()
        self._arrived = 0.0

    @property
    def version(self) -> int | None:
        return self._holding.version

    async def pull(
        self,
        target: VersionInfo,
        known: Mapping[int, VersionInfo],
        transfer_token: bytes,
        *,
        listed: ListVersions | None = None,
    ) -> PullResult:
        """Get a version: by the fewest bytes, from the first source that gives it whole and true.

        What is held moves on only when all of it was verified. A version that is held already
        costs nothing and comes as a whole update.

        Args:
            target: What is wanted, with its sources, best first.
            known: Versions by number as the run told them: their roots are trusted.
            transfer_token: Of the run.
            listed: Tells versions again, when a source has a patch that `known` does not; None:
                such patches are refused.

        Raises:
            PullFailed: VERSION_EVICTED when no source serves it any more; DIGEST_MISMATCH,
                CHUNK_INVALID or SIGNATURE_INVALID when what came is not what the run registered;
                PATCH_UNKNOWN when the run knows no way to it; SOURCE_UNREACHABLE; SOURCE_TIMEOUT.
        """
        started, known = time.monotonic(), {**known, target.version: target}
        listeners = (self._relay, self._copy, self._progress, self._decoder)
        fetch = Fetch(
            self._lane,
            self._memory.ordered(target),
            transfer_token,
            listeners=[each for each in listeners if each is not None],
            settings=self._settings,
            listed=listed,
        )
        async with self._one_at_a_time:
            self._times, self._arrived = PullTimes(), 0.0
            if self.version is None:
                # What requests say of this machine; measuring it would hold up the event loop.
                await asyncio.to_thread(measured_rates)
            await self._holding.flushed()
            await self._holding.restore(known)
            try:
                update = await self._update(target, known, fetch)
            except AstraflowError as error:
                raise PullFailed(error, fetch.reports()) from error
            finally:
                self._memory.note(fetch)
            await self._stand_ready(target, known, fetch, transfer_token)
        reports = fetch.reports()
        return PullResult(
            update=update,
            nbytes=sum(report.nbytes for report in reports),
            duration=timedelta(seconds=(self._arrived or time.monotonic()) - started),
            reports=reports,
            times=self._times,
        )

    def full_update(self) -> WeightUpdate:
        """Return all that is held, dense.

        Raises:
            AstraflowError: NOT_READY when nothing is held.
        """
        return self._holding.full_update()

    async def close(self) -> None:
        await self._lane.close()
        await asyncio.to_thread(self._decoder.close)
        await self._holding.close()
        if self._copy is not None:
            await asyncio.to_thread(self._copy.close)

    async def flush(self) -> None:
        """Return once what is held is written, and the copy on disk as far as it can be."""
        await self._holding.flushed()
        if self._copy is not None:
            await asyncio.to_thread(self._copy.flush)

    async def _stand_ready(
        self,
        target: VersionInfo,
        known: Mapping[int, VersionInfo],
        fetch: Fetch,
        transfer_token: bytes,
    ) -> None:
        """Ask the origin for the next version, if this is the newest and came from there.

        Who pulls from a relay does not: the origin would send everybody a copy. What is taken of a
        version that nobody has registered yet is twice the largest patch between neighbours that
        the run knows, all of the layout where it knows none, and 64 MiB in any case. Where the last
        such patch had more, all that came would be for nothing.
        """
        frame = self._holding.frame
        if not isinstance(self._lane, Lanes) or frame is None:
            return
        layout = frame.layout
        forward = [
            sum(patch.payload_nbytes for patch in step)
            for step in steps(patch for info in known.values() for patch in info.patches)
            if step[0].base_version == step[0].version - 1
        ]
        most = 2 * max(forward) if forward else layout.nbytes
        bound = TransferBound(
            patch_count=1,
            chunk_count=layout.nbytes // CHUNK_NBYTES + len(layout.tensors),
            payload_nbytes=min(max(most, CHUNK_NBYTES), UNPLANNED_NBYTES),
        )
        origin = fetch.origin
        spec = IncomingVersion(
            replace(target, version=target.version + 1), {}, base_version=target.version
        ).spec(goodput_bytes_per_s=origin.link.goodput_bytes_per_s if origin else 0.0)
        spec = replace(spec, max_memory_nbytes=bound.payload_nbytes, bound=bound)
        is_too_large = bool(forward) and forward[-1] > UNPLANNED_NBYTES
        if origin is None or is_too_large or max(known, default=0) > target.version:
            await self._lane.forget_ready(spec)
        else:
            await self._lane.stand_ready(origin.address, spec, transfer_token)

    async def _update(
        self, target: VersionInfo, known: Mapping[int, VersionInfo], fetch: Fetch
    ) -> WeightUpdate:
        holding = self._holding
        if holding.has(target):
            holding.serve(target)
            return holding.full_update()
        *shortcuts, last = self._ways(target, known)
        if holding.frame is None or holding.frame.digest != target.layout_digest:
            holding.frame = await fetch.layout(target.layout_digest)
        for base in shortcuts:
            try:
                return await self._go(base, target, known, fetch)
            except AstraflowError as error:
                # The origin counts, whoever was asked after it.
                if error.reason not in _BARRED and not fetch.is_barred:
                    raise
                log.warning(
                    "the shortest way to a version is barred, trying the next",
                    policy_id=self._policy_id,
                    version=target.version,
                    base_version=None if base is None else base.version,
                    why=str(error),
                )
        return await self._go(last, target, known, fetch)

    def _ways(
        self, target: VersionInfo, known: Mapping[int, VersionInfo]
    ) -> list[HeldState | None]:
        """Return what to start from, the way of the fewest bytes first; None: nothing."""
        held = self._holding.state
        is_base = held is not None and held.frame.digest == target.layout_digest
        costs = [
            (cost, base)
            for base in ((None, held) if is_base else (None,))
            if (cost := payload_nbytes(known, base and base.version, target.version)) is not None
        ]
        if not costs:
            raise AstraflowError(
                Reason.PATCH_UNKNOWN,
                f"the run knows no patch that leads from {self.version} to version"
                f" {target.version} and that this release can read",
            )
        return [base for _, base in sorted(costs, key=lambda pair: pair[0])]

    async def _go(
        self,
        base: HeldState | None,
        target: VersionInfo,
        known: Mapping[int, VersionInfo],
        fetch: Fetch,
    ) -> WeightUpdate:
        """Fetch, stage, verify, and only then move on."""
        holding, frame = self._holding, self._holding.frame
        if frame is None:
            raise AstraflowError(Reason.LAYOUT_UNKNOWN, "no layout has been fetched")
        incoming = IncomingVersion(
            target, known, base_version=base and base.version, leftover=holding.leftover
        )
        self._decoder.over(base)
        try:
            try:
                await fetch.chunks(incoming, frame)
            finally:
                holding.leftover = incoming.chunks
            self._arrived = time.monotonic()
            # Verified chunks that make no sound version would only do the same again.
            holding.leftover = {}
            digests = {version: info.content_digest for version, info in known.items()}
            growing, self._decoder.growing = self._decoder.growing, None
            staging = partial(stage, frame, base, incoming.planned, digests, growing=growing)
            staged = await to_the_end(asyncio.to_thread(staging, self._decoder.decode))
            decoded = time.monotonic()
        except BaseException:
            if self._relay is not None:
                self._relay.fail()
            raise
        finally:
            self._decoder.clear()
        update = await to_the_end(holding.advance(staged, base, target, known))
        self._times = PullTimes(
            verify=timedelta(seconds=incoming.verify_s),
            decode=timedelta(seconds=decoded - self._arrived),
            stage=timedelta(seconds=time.monotonic() - decoded),
        )
        return update
