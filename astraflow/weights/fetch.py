"""Fetch: a version's chunks from its sources, one after the other, until all are here."""

import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import timedelta

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.versions import SourceReport
from astraflow.transport.grpc_lane import GrpcLane
from astraflow.weights.frame import Frame
from astraflow.weights.incoming import Incoming


@dataclass(slots=True, kw_only=True, eq=False)
class _Tally:
    """What one source gave so far."""

    address: str
    nbytes: int = 0
    duration_s: float = 0.0
    bad_chunk_count: int = 0
    failure: AstraflowError | None = None

    def report(self) -> SourceReport:
        return SourceReport(
            address=self.address,
            nbytes=self.nbytes,
            duration=timedelta(seconds=self.duration_s),
            failure=None if self.failure is None else self.failure.to_failure(),
            bad_chunk_count=self.bad_chunk_count,
        )


class Fetch:
    """Asks sources, best first. One that lied is not asked again; a cut is resumed elsewhere.

    All sources are gone through again as long as a round brings anything new, so that a transfer
    over a bad line ends, and one that gets nowhere ends too.
    """

    def __init__(self, lane: GrpcLane, endpoints: Sequence[str], transfer_token: bytes) -> None:
        """Ask nobody yet.

        Args:
            lane: Over which chunks travel.
            endpoints: Of TransferServices, best first.
            transfer_token: Of the run.
        """
        self._lane = lane
        self._token = transfer_token
        self._tallies = [_Tally(address=each) for each in dict.fromkeys(endpoints)]
        self._tried: list[_Tally] = []
        self._failure = AstraflowError(
            Reason.SOURCE_UNREACHABLE, "the version has no source yet", retryable=True
        )

    def reports(self) -> tuple[SourceReport, ...]:
        """Return one report per source that was asked."""
        return tuple(tally.report() for tally in self._tried)

    async def layout(self, digest: bytes) -> Frame:
        """Return the layout with a digest.

        Raises:
            AstraflowError: The failure of the last source.
        """
        for tally in self._honest():
            try:
                frame = Frame(await self._lane.get_layout(tally.address, digest, self._token))
                if frame.digest == digest:
                    return frame
                tally.bad_chunk_count += 1
                self._note(tally, _other_layout(tally.address))
            except AstraflowError as error:
                self._note(tally, error)
        raise self._failure

    async def chunks(self, incoming: Incoming, frame: Frame) -> None:
        """Return once every chunk of some way to the version is here, verified.

        Raises:
            AstraflowError: The failure of the last source.
        """
        while True:
            before = incoming.chunk_count
            for tally in self._honest():
                await self._from(tally, incoming, frame)
                if tally.failure is None:
                    return
            if incoming.chunk_count == before:
                raise self._failure

    def _honest(self) -> list[_Tally]:
        return [tally for tally in self._tallies if not tally.bad_chunk_count]

    async def _from(self, tally: _Tally, incoming: Incoming, frame: Frame) -> None:
        """Take from one source what is still missing."""
        started = time.monotonic()
        nbytes, bad = incoming.nbytes, incoming.bad_chunk_count
        failure: AstraflowError | None = None
        try:
            incoming.begin()
            pulling = self._lane.pull(tally.address, incoming.spec(), self._token)
            async with aclosing(pulling) as items:
                async for item in items:
                    incoming.take(item, frame)
            incoming.require_complete()
        except AstraflowError as error:
            failure = error
        tally.duration_s += time.monotonic() - started
        tally.nbytes += incoming.nbytes - nbytes
        tally.bad_chunk_count += incoming.bad_chunk_count - bad
        self._note(tally, failure)

    def _note(self, tally: _Tally, failure: AstraflowError | None) -> None:
        tally.failure = failure
        self._failure = failure or self._failure
        if tally not in self._tried:
            self._tried.append(tally)


def _other_layout(address: str) -> AstraflowError:
    return AstraflowError(
        Reason.DIGEST_MISMATCH, f"{address} sent another layout than was asked for"
    )
