"""Gains: patches that versions gain after their publication, made beside training.

A version is published with the patch from the one before. What readers that are further behind, or
that hold nothing, would take instead is made here: ONE patch over several versions, a newer whole
version, other profiles. The run registers them before anybody is sent one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from time import monotonic
from typing import Final

import structlog

from astraflow.core.errors import AstraflowError
from astraflow.core.versions import CodecProfile, VersionInfo
from astraflow.weights.errand import Errand
from astraflow.weights.links import PROFILES
from astraflow.weights.maker import make_patch, make_whole
from astraflow.weights.publisher import WeightPublisher
from astraflow.weights.stored import PatchName, StoredPatch, cheapest_way

log = structlog.get_logger(__name__)

FIRST_SPANS: Final = (16, 8, 4, 2)
"""Made for every version: any other span is at most four of these."""

WORTH_NBYTES: Final = 4 << 20
"""A way of fewer bytes is no shorter for being one patch: its reader waits for round trips."""


class Gains(Errand):
    """Makes and announces further patches of a publisher's versions, in a thread of its own.

    Example:
        >>> with Gains(publisher, announce=client.publish_version) as gains:
        ...     client.publish_version(publisher.publish(1, tensors))
        ...     gains.wake()
    """

    def __init__(
        self,
        publisher: WeightPublisher,
        announce: Callable[[VersionInfo], object],
        *,
        time_share: float = 0.25,
        worth_nbytes: int = WORTH_NBYTES,
        then: Callable[[], object] | None = None,
    ) -> None:
        """Prepare; `with` starts the thread.

        Args:
            publisher: Whose versions gain.
            announce: Tells the run of a version again, with the patches that it gained.
            time_share: Of the time between two versions, what rarely used patches may take.
            worth_nbytes: A way of fewer bytes is left as it is.
            then: Called once a version has gained what it could; None: nobody asks.
        """
        super().__init__(name="astraflow-gains")
        self._then = then
        self._publisher = publisher
        self._announce = announce
        self._time_share = time_share
        self._worth_nbytes = worth_nbytes
        self._last = monotonic()
        self._interval_s = 0.0

    def wake(self) -> None:
        """Say that the newest version of the publisher was announced; returns at once."""
        now = monotonic()
        self._interval_s, self._last = now - self._last, now
        self._wake.set()

    def _work(self) -> None:
        self._publisher.settle()
        self._serve_newest()
        if self._then is not None:
            self._then()

    def _serve_newest(self) -> None:
        version = self._publisher.version
        if version is None:
            return
        spans = self._publisher.store.asked_spans
        deadline = monotonic() + self._time_share * self._interval_s
        try:
            self._tell(version, self._made(version, (*spans, *FIRST_SPANS), None))
            self._tell(version, self._made(version, range(self._publisher.store.keep), deadline))
        except AstraflowError as error:
            log.warning("a version gains no patches", version=version, why=str(error))

    def _made(
        self, version: int, spans: Sequence[int], deadline: float | None
    ) -> Iterator[StoredPatch]:
        """Yield what is worth it, until there is a newer version, or no time."""
        for make in gained(self._publisher, version, spans, worth_nbytes=self._worth_nbytes):
            is_late = deadline is not None and monotonic() > deadline
            if self._is_over or self._wake.is_set() or is_late:
                return
            patch = make()
            if patch is not None:
                yield patch

    def _tell(self, version: int, patches: Iterator[StoredPatch]) -> None:
        """Have patches registered, and only then offer them."""
        found = [*patches]
        if found:
            infos = sorted((p.info for p in found), key=lambda each: each.payload_nbytes)
            self._announce(replace(self._publisher.info(version), patches=tuple(infos)))
            self._publisher.store.offer(found)


def gained(
    publisher: WeightPublisher, version: int, spans: Sequence[int], *, worth_nbytes: int = 0
) -> Iterator[Callable[[], StoredPatch | None]]:
    """Yield what may be made for a version, most useful first; a call returns None: not worth it.

    Args:
        publisher: Whose version it is.
        version: Its newest.
        spans: Over how many versions.
        worth_nbytes: Of the way that there is, for one patch to be made in its place.
    """
    history, store = publisher.history, publisher.store
    bases = [version - span for span in spans]
    restored = publisher.info(version).restored_from
    if restored is not None:
        bases.insert(0, restored)
    oldest = history.oldest or 0
    profile, shard = CodecProfile.COMPACT, history.part.shard
    for base in dict.fromkeys(each for each in bases if oldest <= each < version):
        name = PatchName(version=version, base_version=base, profile=profile, shard=shard)
        if name not in store:
            yield lambda b=base: _composite(publisher, b, version, worth_nbytes)
    for profile in PROFILES:
        if _is_due(publisher, version, profile):
            yield lambda p=profile: make_whole(history, version, profile=p)


def _composite(
    publisher: WeightPublisher, base: int, version: int, worth_nbytes: int
) -> StoredPatch | None:
    """Return one patch over several versions, if it is smaller than those between."""
    known = cheapest_way(publisher.store.patches, base, version, _nbytes)
    if known is not None and known[0] < worth_nbytes:
        return None
    patch = make_patch(publisher.history, base, version, profile=CodecProfile.COMPACT)
    return patch if known is None or patch.info.payload_nbytes < known[0] else None


def _is_due(publisher: WeightPublisher, version: int, profile: CodecProfile) -> bool:
    """Whether readers that hold nothing would gain by a newer whole version."""
    store = publisher.store
    usable = [
        each
        for each in store.patches
        if each.info.base_version is not None or each.info.profile is profile
    ]
    wholes = [each.info.version for each in usable if each.info.base_version is None]
    newest = max(wholes, default=-1)
    found = cheapest_way(usable, None, version, _nbytes)
    if found is None or version - newest >= max(store.keep // 2, 1):
        return True
    return found[0] >= 1.5 * found[1][0].info.payload_nbytes


def _nbytes(patch: StoredPatch) -> float:
    return patch.info.payload_nbytes
