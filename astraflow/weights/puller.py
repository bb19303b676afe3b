"""WeightPuller: a version, verified, staged beside what is held.

A receiver serves a version only when a verified patch met a verified base. Chunks are verified
by digests that add up to a root, and roots are taken from the run (VersionInfo) alone, never from
a source. The state that results is compared with the version's state digest. Whatever goes wrong,
what is held stays as it was.
"""

import asyncio
import time
from collections.abc import Collection, Coroutine, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeVar

import structlog

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.updates import WeightUpdate
from astraflow.core.versions import PatchInfo, SourceKind, VersionInfo
from astraflow.rpc.tls import Tls
from astraflow.weights.any_lane import AnyLane
from astraflow.weights.disk_copy import DiskCopy
from astraflow.weights.fetch import Fetch, FetchSettings, Lane, Progress
from astraflow.weights.frame import Frame
from astraflow.weights.incoming import Incoming, VerifiedChunks
from astraflow.weights.listeners import told
from astraflow.weights.pulled import Pulled, PullFailed, PullTimes
from astraflow.weights.relay import Relay
from astraflow.weights.routes import is_readable, payload_nbytes
from astraflow.weights.source_memory import SourceMemory
from astraflow.weights.state import HeldState, StagedState, stage
from astraflow.weights.tensor_updates import dense_updates

Result = TypeVar("Result")

# Another way may be open where this one is not; a source that cannot be reached has none.
_BARRED: Final = frozenset(
    {
        Reason.VERSION_EVICTED,
        Reason.PATCH_UNKNOWN,
        Reason.DIGEST_MISMATCH,
        Reason.CHUNK_INVALID,
    }
)

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class WeightPuller:
    """Holds one policy's weights as a flat state and moves it from version to version."""

    def __init__(
        self,
        policy_id: PolicyId,
        *,
        tls: Tls | None = None,
        stall_timeout_s: float = 30.0,
        lane: Lane | None = None,
        relay: Relay | None = None,
        settings: FetchSettings | None = None,
        kinds: Collection[SourceKind] | None = None,
        copy: DiskCopy | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Start with nothing held.

        Args:
            policy_id: Whose weights.
            tls: Of the sources; None: plain text.
            stall_timeout_s: A source that sends nothing for so long is given up.
            lane: Over which chunks travel, closed with the puller; None: the best that a source
                has.
            relay: Passes on what is pulled; None: nobody does.
            settings: Of how sources are asked.
            kinds: Of the sources that are asked; None: all.
            copy: Keeps on disk what is held, and is closed with the puller; None: nobody does.
            progress: Is told what comes; None: nobody is.
        """
        self._progress = progress
        self._copy = copy
        self._is_restored = copy is None
        self._policy_id = policy_id
        self._lane = lane or AnyLane(tls=tls, stall_timeout_s=stall_timeout_s)
        self._relay = relay
        self._settings = settings or FetchSettings()
        self._memory = SourceMemory(kinds, avoided_s=self._settings.avoided_s)
        self._one_at_a_time = asyncio.Lock()
        self._frame: Frame | None = None
        self._held: HeldState | None = None
        self._leftover: VerifiedChunks = {}
        self._times = PullTimes()
        self._arrived = 0.0

    @property
    def version(self) -> int | None:
        """What is held and verified; None: nothing."""
        return None if self._held is None else self._held.version

    async def pull(
        self, target: VersionInfo, known: Mapping[int, VersionInfo], transfer_token: bytes
    ) -> Pulled:
        """Get a version: by the fewest bytes, from the first source that gives it whole and true.

        What is held moves on only when all of it was verified. A version that is held already
        costs nothing and comes as a whole update.

        Args:
            target: What is wanted, with its sources, best first.
            known: Versions by number as the run told them: their roots are trusted.
            transfer_token: Of the run.

        Raises:
            PullFailed: VERSION_EVICTED when no source serves it any more; DIGEST_MISMATCH or
                CHUNK_INVALID when what came is not what the run registered; PATCH_UNKNOWN when
                the run knows no way to it; SOURCE_UNREACHABLE or SOURCE_TIMEOUT.
        """
        started = time.monotonic()
        fetch = Fetch(
            self._lane,
            self._memory.ordered(target),
            transfer_token,
            links=self._memory.links,
            progress=told(self._relay, self._copy, self._progress),
            settings=self._settings,
        )
        async with self._one_at_a_time:
            self._times, self._arrived = PullTimes(), 0.0
            await self._restore({**known, target.version: target})
            try:
                update = await self._update(target, {**known, target.version: target}, fetch)
            except AstraflowError as error:
                raise PullFailed(error, fetch.reports()) from error
            finally:
                self._memory.note(fetch)
        reports = fetch.reports()
        return Pulled(
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
        if self._held is None:
            raise AstraflowError(Reason.NOT_READY, f"no weights of {self._policy_id} are held")
        return WeightUpdate(
            policy_id=self._policy_id,
            version=self._held.version,
            base_version=None,
            tensors=dense_updates(self._held.frame.layout, self._held.flat),
        )

    async def close(self) -> None:
        """Close all connections, and the copy on disk."""
        await self._lane.close()
        if self._copy is not None:
            await asyncio.to_thread(self._copy.close)

    async def settle(self) -> None:
        """Return once the copy on disk is as far as it can be."""
        if self._copy is not None:
            await asyncio.to_thread(self._copy.settle)

    async def _restore(self, known: Mapping[int, VersionInfo]) -> None:
        """Take what the copy on disk holds, once; what the run knows otherwise is not taken."""
        if self._is_restored or self._copy is None:
            return
        loaded = await asyncio.to_thread(self._copy.load)
        self._is_restored = True
        self._frame, self._leftover = loaded.frame, loaded.chunks
        held = loaded.held
        if held is None:
            return
        registered = known.get(held.version)
        if registered is None or registered.content_digest == held.digest.to_bytes():
            self._held = held
            log.info("found weights on disk", policy_id=self._policy_id, version=held.version)
            return
        self._copy.forget()
        log.warning(
            "the weights on disk are of another run",
            policy_id=self._policy_id,
            version=held.version,
        )

    async def _update(
        self, target: VersionInfo, known: Mapping[int, VersionInfo], fetch: Fetch
    ) -> WeightUpdate:
        if self._has(target):
            if self._relay is not None and self._held is not None:
                # It may be from disk, and new to the relay.
                self._relay.hold(self._held, _whole_patch(target))
            return self.full_update()
        *shortcuts, last = self._ways(target, known)
        if self._frame is None or self._frame.digest != target.layout_digest:
            self._frame = await fetch.layout(target.layout_digest)
        for base in shortcuts:
            try:
                return await self._go(base, target, known, fetch)
            except AstraflowError as error:
                if error.reason not in _BARRED:
                    raise
                log.warning(
                    "the shortest way to a version is barred, trying the next",
                    policy_id=self._policy_id,
                    version=target.version,
                    base_version=None if base is None else base.version,
                    why=str(error),
                )
        return await self._go(last, target, known, fetch)

    def _has(self, target: VersionInfo) -> bool:
        return (
            self._held is not None
            and self._held.version == target.version
            and self._held.frame.digest == target.layout_digest
            and self._held.digest.to_bytes() == target.content_digest
        )

    def _ways(
        self, target: VersionInfo, known: Mapping[int, VersionInfo]
    ) -> list[HeldState | None]:
        """Return what to start from, the way of the fewest bytes first; None: nothing."""
        bases: list[HeldState | None] = [None]
        if self._held is not None and self._held.frame.digest == target.layout_digest:
            bases.append(self._held)
        costs = [
            (cost, base)
            for base in bases
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
        frame = self._frame
        if frame is None:
            raise AstraflowError(Reason.LAYOUT_UNKNOWN, "no layout has been fetched")
        incoming = Incoming(
            target, known, base_version=base and base.version, leftover=self._leftover
        )
        try:
            try:
                await fetch.chunks(incoming, frame)
            finally:
                self._leftover = incoming.chunks
            self._arrived = time.monotonic()
            # Verified chunks that make no sound version would only do the same again.
            self._leftover = {}
            digests = {version: info.content_digest for version, info in known.items()}
            staging = asyncio.to_thread(stage, frame, base, incoming.patches(), digests)
            staged = await _to_the_end(staging)
            decoded = time.monotonic()
        except BaseException:
            if self._relay is not None:
                self._relay.fail()
            raise
        update = await _to_the_end(self._advance(staged, base, target, known))
        self._times = PullTimes(
            verify=timedelta(seconds=incoming.verify_s),
            decode=timedelta(seconds=decoded - self._arrived),
            stage=timedelta(seconds=time.monotonic() - decoded),
        )
        return update

    async def _advance(
        self,
        staged: StagedState,
        base: HeldState | None,
        target: VersionInfo,
        known: Mapping[int, VersionInfo],
    ) -> WeightUpdate:
        """Write the changes; a relay serves nothing from the state meanwhile."""
        if self._relay is not None:
            self._relay.release()
        commit = staged.commit
        if self._copy is not None:
            commit = partial(self._copy.commit, staged, known, base and base.version)
        self._held = await asyncio.to_thread(commit)
        if self._relay is not None:
            self._relay.hold(self._held, _whole_patch(target))
        return await asyncio.to_thread(self._update_of, staged, base)

    def _update_of(self, staged: StagedState, base: HeldState | None) -> WeightUpdate:
        return WeightUpdate(
            policy_id=self._policy_id,
            version=staged.state.version,
            base_version=base and base.version,
            tensors=staged.tensor_updates(),
        )


async def _to_the_end(work: Coroutine[Any, Any, Result]) -> Result:
    """Await work that a cancellation must not leave running behind the caller's back."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def _whole_patch(target: VersionInfo) -> PatchInfo | None:
    wholes = (each for each in target.patches if each.base_version is None and is_readable(each))
    return next(wholes, None)
