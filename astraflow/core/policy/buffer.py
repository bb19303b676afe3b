"""The fresh buffer of a policy: whole groups in the order in which they are trained on."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush, nsmallest

from astraflow.core.samples import FreshGroup, Sample
from astraflow.core.settings import BufferOrder, BufferSettings


class FreshBuffer:
    """Groups by deadline, the last version that may train on them, or by arrival.

    The law: what `take` returns was sampled at most `max_staleness` versions before the
    version that trains on it, once `prune` was called for that version.

    Example:
        With max_staleness 2, groups sampled from versions 5, 3 and 4 are taken for version 5
        as 3, 4, 5; first in, first out as 5, 3, 4. For version 6 the samples of 3 are stale:
        `prune` takes them out.
    """

    def __init__(
        self, *, max_staleness: int, settings: BufferSettings | None = None, least_groups: int = 1
    ) -> None:
        """Begin empty.

        Args:
            max_staleness: Versions between sampling and training, at most.
            settings: None: the defaults.
            least_groups: So many are never evicted for want of room.
        """
        self._max_staleness = max_staleness
        self._settings = settings or BufferSettings()
        self._least_groups = least_groups
        self._heap: list[tuple[int, int, FreshGroup]] = []
        self._sample_count = 0
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[FreshGroup]:
        """Return all groups, in no order."""
        return (group for _, _, group in self._heap)

    @property
    def sample_count(self) -> int:
        return self._sample_count

    @property
    def nbytes(self) -> int:
        """Bytes of all groups, as `AcceptedRollout.nbytes`."""
        return self._nbytes

    def put(self, group: FreshGroup) -> None:
        is_edf = self._settings.order is BufferOrder.EDF
        key = group.min_version if is_edf else 0
        heappush(self._heap, (key, group.arrival, group))
        self._count(group, 1)

    def evict(self) -> list[FreshGroup]:
        """Take out what there is no room for: what would be trained on next has least to lose."""
        gone: list[FreshGroup] = []
        while len(self._heap) > self._least_groups and self._is_over():
            gone += self.take(1)
        return gone

    def prune(self, train_version: int) -> tuple[list[Sample], list[FreshGroup]]:
        """Take out what would be too old for a version.

        Returns:
            The stale samples, and the groups that nothing is left of that has a loss.
        """
        oldest = train_version - self._max_staleness
        stale: list[Sample] = []
        gone: list[FreshGroup] = []
        for group in self._too_old(oldest):
            self._count(group, -1)
            kept = tuple(s for s in group.samples if s.min_version >= oldest)
            if all(sample.is_masked for sample in kept):
                kept = ()
            stale += [sample for sample in group.samples if sample not in kept]
            group.samples = kept
            if group.samples:
                self.put(group)
            else:
                gone.append(group)
        return stale, gone

    def peek(self, count: int) -> list[FreshGroup]:
        """Return what `take` would."""
        return [entry[2] for entry in nsmallest(count, self._heap)]

    def take(self, count: int) -> tuple[FreshGroup, ...]:
        groups = tuple(heappop(self._heap)[2] for _ in range(min(count, len(self._heap))))
        for group in groups:
            self._count(group, -1)
        return groups

    def take_these(self, groups: tuple[FreshGroup, ...]) -> bool:
        """Take out exactly these groups; False, and nothing happens, when one is not here."""
        wanted = {group.arrival for group in groups}
        here = [entry for entry in self._heap if entry[1] in wanted]
        if len(here) != len(wanted):
            return False
        self._heap = [entry for entry in self._heap if entry[1] not in wanted]
        heapify(self._heap)
        for entry in here:
            self._count(entry[2], -1)
        return True

    def clear(self) -> tuple[FreshGroup, ...]:
        return self.take(len(self._heap))

    def metrics(self) -> dict[str, float]:
        return {"buffer/size": float(self._sample_count), "buffer/nbytes": float(self._nbytes)}

    def _too_old(self, oldest: int) -> list[FreshGroup]:
        """Take out the groups that have a sample older than a version."""
        if self._settings.order is BufferOrder.EDF:
            found: list[FreshGroup] = []
            while self._heap and self._heap[0][0] < oldest:
                found.append(heappop(self._heap)[2])
            return found
        found = [entry[2] for entry in sorted(self._heap) if entry[2].min_version < oldest]
        if found:
            self._heap = [entry for entry in self._heap if entry[2].min_version >= oldest]
            heapify(self._heap)
        return found

    def _is_over(self) -> bool:
        most, most_nbytes = self._settings.max_groups, self._settings.max_nbytes
        return (most is not None and len(self._heap) > most) or (
            most_nbytes is not None and self._nbytes > most_nbytes
        )

    def _count(self, group: FreshGroup, sign: int) -> None:
        self._sample_count += sign * len(group.samples)
        self._nbytes += sign * group.nbytes
