"""Scrub: a publisher's copy of the weights is compared with what it should be, beside training.

Patches are differences from this copy, and its digest is kept current by what they change. One bit
that flips in memory makes the next patch wrong for every reader, and the digest of every version
after it: they would refuse all of them for ever. Whoever looks at all bits finds that out.
"""

from collections.abc import Callable
from time import monotonic

import structlog

from astraflow.weights.errand import Errand
from astraflow.weights.publisher import WeightPublisher

log = structlog.get_logger(__name__)


class Scrub(Errand):
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
        """Prepare; `with` starts the thread.

        Args:
            publisher: Whose copy.
            damaged: Called when it is found damaged: the next version should come soon.
            time_share: Of one core, that this may take.
        """
        super().__init__(name="astraflow-scrub")
        self._publisher = publisher
        self._damaged = damaged
        self._time_share = time_share
        self._next = 0.0
        # Versions that readers could not verify; and up to which one that was looked into.
        self._doubted = self._cleared = -1

    def doubt(self, version: int) -> None:
        """Look at all bits now: a reader could not verify a version; returns at once.

        Once per version, whoever says it how often.
        """
        if version > self._cleared:
            self._doubted = max(self._doubted, version)
            self._wake.set()

    @property
    def _is_doubted(self) -> bool:
        return self._doubted > self._cleared

    def wake(self) -> None:
        """Say that there is a newer version; returns at once."""
        self._wake.set()

    def _work(self) -> None:
        while not (self._is_over or self._is_doubted) and (left_s := self._next - monotonic()) > 0:
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
