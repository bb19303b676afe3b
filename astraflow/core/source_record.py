"""SourceRecord: how fast each source was towards each region, who says that it lied or stalled."""

from collections.abc import Iterable
from typing import Any, Final

from astraflow.core.errors import Reason
from astraflow.core.ids import MemberId
from astraflow.core.versions import SourceReport

_KEPT: Final = 1024
# Shorter transfers say more about round trips than about the line.
_MEASURED_NBYTES: Final = 64 << 10
_NEWEST_SHARE: Final = 0.5
_WITNESS_COUNT: Final = 2


class SourceRecord:
    """What receivers said of sources, by address; the oldest is forgotten first.

    One receiver's word counts for itself: who lies about sources bars nobody else from them.
    From two receivers on a source is avoided by all.
    """

    def __init__(self) -> None:
        self._goodputs: dict[tuple[str, str], float] = {}
        self._witnesses: dict[str, set[MemberId]] = {}
        self._stalled: dict[str, set[MemberId]] = {}

    def note(self, member_id: MemberId, region: str, reports: Iterable[SourceReport]) -> None:
        """Take what one receiver says after an update."""
        for report in reports:
            seconds = report.duration.total_seconds()
            if report.nbytes >= _MEASURED_NBYTES and seconds > 0:
                self._measure((report.address, region), report.nbytes / seconds)
            if report.bad_chunk_count:
                self._witnesses.setdefault(report.address, set()).add(member_id)
            if report.failure is not None and report.failure.reason is Reason.SOURCE_TIMEOUT:
                self._stalled.setdefault(report.address, set()).add(member_id)
        for kept in (self._goodputs, self._witnesses, self._stalled):
            _trim(kept)

    def note_alive(self, address: str) -> None:
        """Take a sign of life of a source: it has stalled no longer."""
        self._stalled.pop(address, None)

    def has_stalled(self, address: str, member_id: MemberId | None = None) -> bool:
        """Whether a source has stalled for the caller, or two others, and is silent since."""
        witnesses = self._stalled.get(address, ())
        return member_id in witnesses or len(witnesses) >= _WITNESS_COUNT

    def goodput_bytes_per_s(self, address: str, region: str) -> float:
        """Return the moving mean towards a region; 0: never measured."""
        return self._goodputs.get((address, region), 0.0)

    def is_avoided(self, address: str, member_id: MemberId | None) -> bool:
        """Whether a source has lied to the caller, or to two others."""
        witnesses = self._witnesses.get(address, ())
        return member_id in witnesses or len(witnesses) >= _WITNESS_COUNT

    def _measure(self, key: tuple[str, str], goodput: float) -> None:
        before = self._goodputs.pop(key, goodput)
        self._goodputs[key] = before + _NEWEST_SHARE * (goodput - before)


def _trim(kept: dict[Any, Any]) -> None:
    while len(kept) > _KEPT:
        del kept[next(iter(kept))]
