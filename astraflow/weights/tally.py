"""Tally: what one source gave so far during one pull."""

import time
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Final

from astraflow.core.errors import AstraflowError
from astraflow.core.versions import Source, SourceKind, SourceReport, SourceState
from astraflow.weights.signs import Patience, StallWatch

# Shorter transfers say more about round trips than about the line.
_MEASURED_NBYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLink:
    """The way to one source.

    Attributes:
        goodput_bytes_per_s: 0: never measured.
        answer_s: From a request to its first sign; 0: never asked.
    """

    goodput_bytes_per_s: float = 0.0
    answer_s: float = 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class Tally:
    """Counts what comes from a source.

    Attributes:
        source: Which one.
        link: Measured last.
        nbytes: Payload received and verified.
        duration_s: Time in which it was asked.
        bad_chunk_count: Chunks, or lists of their digests, that were refused.
        failure: Of the last time that it was asked.
        since_s: When what came began to, where it was asked for ahead; None: it was not.
    """

    source: Source
    link: MeasuredLink = field(default_factory=MeasuredLink)
    nbytes: int = 0
    duration_s: float = 0.0
    bad_chunk_count: int = 0
    failure: AstraflowError | None = None
    since_s: float | None = None

    @property
    def address(self) -> str:
        """Its endpoint, or its URI without one."""
        return self.source.address

    @property
    def is_relay(self) -> bool:
        """Whether it passes on what it pulled."""
        return self.source.kind is SourceKind.RELAY

    @property
    def failed_ahead(self) -> bool:
        """Whether it failed by what it sent ahead, without a lie."""
        return bool(self.failure and self.since_s is not None and not self.bad_chunk_count)

    def is_beside(self, other: Source) -> bool:
        """Whether it has the version whole, and is as near as another source."""
        return (
            self.source.state is SourceState.LIVE
            and self.source.kind is other.kind
            and self.source.region == other.region
        )

    def watch(self, patience: Patience, *, is_only: bool) -> StallWatch:
        """Begin a transfer from it."""
        return StallWatch(
            self.address,
            patience,
            answer_s=self.link.answer_s,
            goodput_bytes_per_s=self.link.goodput_bytes_per_s,
            is_only=is_only,
        )

    def learn(self, watch: StallWatch) -> None:
        """Keep what a transfer has shown."""
        self.link, self.since_s = replace(self.link, answer_s=watch.answer_s), watch.since_s

    def spend(self, started_s: float, nbytes: int) -> None:
        """Count the time since a transfer began, in which so much came, and measure."""
        duration_s = time.monotonic() - (self.since_s or started_s)
        self.duration_s += duration_s
        if nbytes >= _MEASURED_NBYTES and duration_s > 0:
            self.link = replace(self.link, goodput_bytes_per_s=nbytes / duration_s)

    def report(self) -> SourceReport:
        """Return what the run is told."""
        return SourceReport(
            address=self.address,
            nbytes=self.nbytes,
            duration=timedelta(seconds=self.duration_s),
            failure=None if self.failure is None else self.failure.to_failure(),
            bad_chunk_count=self.bad_chunk_count,
        )
