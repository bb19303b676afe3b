"""SourceMemory: what a puller remembers of its sources from one pull to the next."""

import time
from collections.abc import Collection
from typing import Final

from astraflow.core.errors import Reason
from astraflow.core.versions import Source, SourceKind, VersionInfo
from astraflow.weights.fetch import Fetch
from astraflow.weights.shard_lane import joined
from astraflow.weights.tally import MeasuredLink

_SILENT: Final = frozenset({Reason.SOURCE_UNREACHABLE, Reason.SOURCE_TIMEOUT})
_KEPT_LINKS: Final = 64


class SourceMemory:
    """Orders sources by who answered of late, and keeps what was measured of them.

    Attributes:
        links: Measured, by address; of the sources asked last.
    """

    def __init__(self, kinds: Collection[SourceKind] | None, *, avoided_s: float) -> None:
        """Remember nothing.

        Args:
            kinds: Of the sources that are asked; None: all.
            avoided_s: A source from which nothing came comes after the others for so long.
        """
        self.links: dict[str, MeasuredLink] = {}
        self._kinds = frozenset(SourceKind if kinds is None else kinds)
        self._avoided_s = avoided_s
        self._silent_until: dict[str, float] = {}

    def ordered(self, target: VersionInfo) -> list[Source]:
        """Return who is asked for a version; those that could not be reached of late come last."""
        now = time.monotonic()
        asked = joined(each for each in target.sources if each.kind in self._kinds)
        return sorted(asked, key=lambda each: self._silent_until.get(each.address, now) > now)

    def note(self, fetch: Fetch) -> None:
        """Take what came of a pull."""
        now = time.monotonic()
        for each in fetch.reports():
            is_silent = each.failure is not None and each.failure.reason in _SILENT
            if is_silent and not each.nbytes:
                self._silent_until[each.address] = now + self._avoided_s
        self._silent_until = {a: until for a, until in self._silent_until.items() if until > now}
        for address, link in fetch.links().items():
            self.links.pop(address, None)
            self.links[address] = link
        while len(self.links) > _KEPT_LINKS:
            del self.links[next(iter(self.links))]
