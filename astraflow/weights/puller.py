"""WeightPuller: a version, verified, staged beside what is held.

A receiver serves a version only when a verified patch met a verified base. Chunks are verified
by digests that add up to a root, and roots are taken from the run (VersionInfo) alone, never from
a source. The state that results is compared with the version's state digest. Whatever goes wrong,
what is held stays as it was.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.layout import Layout
from astraflow.core.updates import WeightUpdate
from astraflow.core.versions import Source, SourceKind, SourceReport, VersionInfo
from astraflow.rpc.tls import Tls
from astraflow.transport.grpc_lane import GrpcLane
from astraflow.weights.flat import dense_updates
from astraflow.weights.incoming import Incoming
from astraflow.weights.state import HeldState
from astraflow.wire.weights import layout_digest

_ATTEMPTS = 3
_CUT = frozenset({Reason.SOURCE_UNREACHABLE, Reason.NOT_READY, Reason.SOURCE_TIMEOUT})


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """A version that arrived.

    Attributes:
        update: What it asks of the engine.
        nbytes: Payload received, from all sources.
        duration: First request to last chunk verified.
        reports: One per source tried.
    """

    update: WeightUpdate
    nbytes: int
    duration: timedelta
    reports: tuple[SourceReport, ...]


class WeightPuller:
    """Holds one policy's weights as a flat state and moves it from version to version."""

    def __init__(self, policy_id: PolicyId, *, tls: Tls | None = None) -> None:
        """Start with nothing held."""
        self._policy_id = policy_id
        self._lane = GrpcLane(tls=tls)
        self._layout: Layout | None = None
        self._layout_digest = b""
        self._held: HeldState | None = None

    @property
    def version(self) -> int | None:
        """What is held and verified; None: nothing."""
        return None if self._held is None else self._held.version

    async def pull(
        self, target: VersionInfo, known: Mapping[int, VersionInfo], transfer_token: bytes
    ) -> Pulled:
        """Get a version from the first source that gives it whole and true.

        Args:
            target: What is wanted, with its sources, best first.
            known: Versions by number as the run told them: their roots are trusted.
            transfer_token: Of the run.

        Raises:
            AstraflowError: VERSION_EVICTED when it is no longer served; the failure of the last
                source; DIGEST_MISMATCH when the state that resulted is not the version's.
        """
        started = time.monotonic()
        trusted = {**known, target.version: target}
        incoming = Incoming(target, trusted, base_version=self._base_for(target))
        reports: list[SourceReport] = []
        sources = [
            source for source in target.sources if source.kind is not SourceKind.OBJECT_STORE
        ]
        failure: AstraflowError | None = None
        for source in sources:
            report, failure = await self._from_source(source, incoming, transfer_token)
            reports.append(report)
            if failure is None:
                break
        if failure is not None:
            raise failure
        if not sources:
            raise AstraflowError(
                Reason.SOURCE_UNREACHABLE, f"version {target.version} has no source yet"
            )
        update = self._apply(incoming)
        return Pulled(
            update=update,
            nbytes=sum(report.nbytes for report in reports),
            duration=timedelta(seconds=time.monotonic() - started),
            reports=tuple(reports),
        )

    def full_update(self) -> WeightUpdate:
        """Return all that is held, dense.

        Raises:
            AstraflowError: NOT_READY when nothing is held.
        """
        if self._held is None or self._layout is None:
            raise AstraflowError(Reason.NOT_READY, f"no weights of {self._policy_id} are held")
        return WeightUpdate(
            policy_id=self._policy_id,
            version=self._held.version,
            base_version=None,
            tensors=dense_updates(self._layout, self._held.flat),
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._lane.close()

    def _base_for(self, target: VersionInfo) -> int | None:
        """Return the held version when a patch can start from it."""
        if self._held is None or target.layout_digest != self._layout_digest:
            return None
        return self._held.version if self._held.version < target.version else None

    async def _from_source(
        self, source: Source, incoming: Incoming, token: bytes
    ) -> tuple[SourceReport, AstraflowError | None]:
        """Take from one source what is still missing; a cut is resumed a few times."""
        started, before = time.monotonic(), incoming.nbytes
        failure: AstraflowError | None = None
        for _ in range(_ATTEMPTS):
            failure = await self._attempt(source, incoming, token)
            if failure is None or failure.reason not in _CUT:
                break
        report = SourceReport(
            address=source.endpoint,
            nbytes=incoming.nbytes - before,
            duration=timedelta(seconds=time.monotonic() - started),
            failure=None if failure is None else failure.to_failure(),
            bad_chunk_count=int(_is_lie(failure)),
        )
        return report, failure

    async def _attempt(
        self, source: Source, incoming: Incoming, token: bytes
    ) -> AstraflowError | None:
        try:
            await self._ensure_layout(source, incoming.target, token)
            layout = self._require_layout()
            async for item in self._lane.pull(source.endpoint, incoming.spec(), token):
                incoming.take(item, layout)
            incoming.require_complete()
        except AstraflowError as error:
            return error
        return None

    async def _ensure_layout(self, source: Source, target: VersionInfo, token: bytes) -> None:
        """Fetch the layout once; its digest, which the run registered, proves it."""
        if target.layout_digest == self._layout_digest:
            return
        layout = await self._lane.get_layout(source.endpoint, target.layout_digest, token)
        if layout_digest(layout) != target.layout_digest:
            raise AstraflowError(
                Reason.DIGEST_MISMATCH, f"{source.endpoint} sent another layout than was asked for"
            )
        self._layout, self._layout_digest, self._held = layout, target.layout_digest, None

    def _require_layout(self) -> Layout:
        if self._layout is None:
            raise AstraflowError(Reason.LAYOUT_UNKNOWN, "no layout has been fetched")
        return self._layout

    def _apply(self, incoming: Incoming) -> WeightUpdate:
        """Move the held state to the version, or leave it as it was."""
        layout = self._require_layout()
        held = self._held
        if held is None or incoming.is_whole:
            held = HeldState.empty(layout)
        try:
            tensors = held.advance(incoming.target, incoming.patches())
        except AstraflowError:
            # Every chunk was what the run registered, so what is held is not: start anew.
            self._held = None
            raise
        is_from_nothing = held is not self._held
        self._held = held
        return WeightUpdate(
            policy_id=self._policy_id,
            version=incoming.target.version,
            base_version=None if is_from_nothing else incoming.base_version,
            tensors=tensors,
        )


def _is_lie(failure: AstraflowError | None) -> bool:
    return failure is not None and failure.reason in (
        Reason.DIGEST_MISMATCH,
        Reason.CHUNK_INVALID,
        Reason.INVALID_FIELD,
    )
