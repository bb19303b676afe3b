"""Work beside training, each in a thread of low priority: a scrub of the copy, and extra patches.

The scrub compares a publisher's copy of the weights with what it should be. Patches are differences
from this copy, and its digest is kept current by what they change. One bit that flips in memory
makes the next patch wrong for every reader, and the digest of every version after it: they would
refuse all of them for ever. Whoever looks at all bits finds that out.

A version is published with the patch from the one before. What readers that are further behind, or
that hold nothing, would take instead is made as an extra patch: ONE patch over several versions, a
newer whole version, other profiles. The run registers them before anybody is sent one.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from time import monotonic
from typing import Final, Self

import structlog

from astraflow.core.errors import AstraflowError
from astraflow.core.versions import CodecProfile, VersionInfo
from astraflow.weights.patches.patch import (
    Patch,
    PatchName,
    cheapest_patches,
    make_patch,
)
from astraflow.weights.patches.routes import PROFILES
from astraflow.weights.publish.publisher import WeightPublisher

_NICENESS: Final = 10


def lower_priority() -> None:
    """Have the thread that runs this come after others."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


class BackgroundWorker:
    """Works on what a publisher has when it is woken; what comes meanwhile is one more time.

    With `last_s` the work is done once more at its end, which is waited for that long.
    """

    def __init__(self, publisher: WeightPublisher, *, name: str, last_s: float = 0.0) -> None:
        self._publisher = publisher
        self._last_s = last_s
        self._is_over = self._has_failed = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        """End the thread, after what it is at; one that hangs is left behind after `last_s`."""
        self._has_failed = failure is not None
        self._is_over = True
        self._wake.set()
        self._thread.join(self._last_s or None)

    def wake(self) -> None:
        """Say that the newest version of the publisher was announced; returns at once."""
        self._wake.set()

    def _run(self) -> None:
        lower_priority()
        is_over = False
        while not is_over:
            self._wake.wait()
            self._wake.clear()
            is_over = self._is_over
            if not is_over or self._last_s:
                self._work()

    def _work(self) -> None:
        raise NotImplementedError


log = structlog.get_logger(__name__)


class Scrub(BackgroundWorker):
    """Looks at a publisher's versions, as often as it may, in a thread of its own.

    Example:
        >>> with Scrub(publisher, damaged=client.order_publish) as scrub:
        ...     client.publish_version(publisher.publish(1, tensors))
        ...     scrub.wake()
    """

    def __init__(
        self,
        publisher: WeightPublisher,
        *,
        damaged: Callable[[], object],
        time_share: float = 0.05,
    ) -> None:
        """Look at nothing; `with` starts the thread.

        Args:
            publisher: Whose copy.
            damaged: Called when it is found damaged: the next version should come soon.
            time_share: Of one core, that this may take.
        """
        super().__init__(publisher, name="astraflow-scrub")
        self._damaged = damaged
        self._time_share = time_share
        self._next = 0.0
        # Versions that readers could not verify; and up to which one that was looked into.
        self._doubted = self._cleared = -1

    def check_now(self, version: int) -> None:
        """Look at all bits now: a reader could not verify a version; returns at once.

        Once per version, whoever says it how often.
        """
        if version > self._cleared:
            self._doubted = max(self._doubted, version)
            self._wake.set()

    def _work(self) -> None:
        while (left_s := self._next - monotonic()) > 0:
            if self._is_over or self._doubted > self._cleared:
                break
            self._wake.wait(left_s)
            self._wake.clear()
        if self._is_over:
            # Whoever waits for the wake that this has taken sees it again.
            self._wake.set()
            return
        began, doubted = monotonic(), self._doubted
        is_sound = self._publisher.scrub()
        if is_sound is None:
            # A version came meanwhile, and with it, or soon after, a wake.
            return
        self._next = monotonic() + (monotonic() - began) / self._time_share
        if not is_sound:
            self._damaged()
        elif doubted > self._cleared:
            log.warning(
                "a reader could not verify a version; the copy here is sound, so that it was"
                " damaged on the way or by the reader",
                policy_id=self._publisher.policy_id,
                version=doubted,
            )
        self._cleared = doubted


FIRST_SPANS: Final = (16, 8, 4, 2)
"""Made for every version: any other span is at most four of these."""

WORTH_NBYTES: Final = 4 << 20
"""A way of fewer bytes is no shorter for being one patch: its reader waits for round trips."""


class ExtraPatches(BackgroundWorker):
    """Makes and announces further patches of a publisher's versions, in a thread of its own.

    Example:
        >>> with ExtraPatches(publisher, announce=client.publish_version) as patches:
        ...     client.publish_version(publisher.publish(1, tensors))
        ...     patches.wake()
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
        """Make nothing; `with` starts the thread.

        Args:
            publisher: Whose versions gain.
            announce: Tells the run of a version again, with the patches that it gained.
            time_share: Of the time between two versions, what rarely used patches may take.
            worth_nbytes: A way of fewer bytes is left as it is.
            then: Called once a version has gained what it could; None: nobody asks.
        """
        super().__init__(publisher, name="astraflow-extra-patches")
        self._then = then
        self._announce = announce
        self._time_share = time_share
        self._worth_nbytes = worth_nbytes
        self._last = monotonic()
        self._interval_s = 0.0

    def wake(self) -> None:
        now = monotonic()
        self._interval_s, self._last = now - self._last, now
        super().wake()

    def _work(self) -> None:
        self._publisher.flush()
        version, store = self._publisher.version, self._publisher.store
        deadline = monotonic() + self._time_share * self._interval_s
        if version is not None:
            try:
                first = (*store.requested_spans, *FIRST_SPANS)
                self._register(version, self._made(version, first, None))
                self._register(version, self._made(version, range(store.keep), deadline))
            except AstraflowError as error:
                log.warning("a version gains no patches", version=version, why=str(error))
        if self._then is not None:
            self._then()

    def _made(self, version: int, spans: Sequence[int], deadline: float | None) -> Iterator[Patch]:
        """Yield what is worth it, until there is a newer version, or no time."""
        for make in candidate_patches(
            self._publisher, version, spans, worth_nbytes=self._worth_nbytes
        ):
            is_late = deadline is not None and monotonic() > deadline
            if self._is_over or self._wake.is_set() or is_late:
                return
            patch = make()
            if patch is not None:
                yield patch

    def _register(self, version: int, patches: Iterator[Patch]) -> None:
        """Have patches registered, and only then offer them."""
        found = [*patches]
        if found:
            infos = sorted((p.info for p in found), key=lambda each: each.payload_nbytes)
            self._announce(replace(self._publisher.info(version), patches=tuple(infos)))
            self._publisher.store.offer(found)


def candidate_patches(
    publisher: WeightPublisher, version: int, spans: Sequence[int], *, worth_nbytes: int = 0
) -> Iterator[Callable[[], Patch | None]]:
    """Yield what may be made for a version, most useful first; None: it is not worth it."""
    history, store = publisher.history, publisher.store
    bases = [version - span for span in spans]
    restored = publisher.info(version).restored_from
    if restored is not None:
        bases.insert(0, restored)
    oldest = history.oldest or 0
    profile, shard = CodecProfile.COMPACT, history.shard_layout.shard
    for base in dict.fromkeys(each for each in bases if oldest <= each < version):
        name = PatchName(version=version, base_version=base, profile=profile, shard=shard)
        if name not in store:
            yield lambda b=base: _composite(publisher, b, version, worth_nbytes)
    for profile in PROFILES:
        if _is_due(publisher, version, profile):
            yield lambda p=profile: make_patch(history, None, version, profile=p)


def _composite(
    publisher: WeightPublisher, base: int, version: int, worth_nbytes: int
) -> Patch | None:
    """Return one patch over several versions, if it is smaller than those between."""
    known = cheapest_patches(publisher.store.patches, base, version, _nbytes)
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
    found = cheapest_patches(usable, None, version, _nbytes)
    if found is None or version - newest >= max(store.keep // 2, 1):
        return True
    return found[0] >= 1.5 * found[1][0].info.payload_nbytes


def _nbytes(patch: Patch) -> float:
    return patch.info.payload_nbytes
