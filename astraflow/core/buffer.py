"""The fresh buffer of a policy: whole groups, the one that turns stale first comes first."""

from heapq import heapify, heappop, heappush

from astraflow.core.samples import FreshGroup, Sample


class FreshBuffer:
    """Groups by deadline, the last version that may train on them; ties by arrival.

    The law: what `take` returns was sampled at most `max_staleness` versions before the
    version that trains on it.

    Example:
        With max_staleness 2, groups sampled from versions 5, 3 and 4 are taken for version 5
        as 3, 4, 5. For version 6 the samples of 3 are stale: `prune` takes them out.
    """

    def __init__(self, *, max_staleness: int) -> None:
        self._max_staleness = max_staleness
        self._heap: list[tuple[int, int, FreshGroup]] = []
        self._sample_count = 0

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def sample_count(self) -> int:
        """Samples in all groups."""
        return self._sample_count

    def put(self, group: FreshGroup) -> None:
        """Add a group."""
        deadline = group.min_version + self._max_staleness
        heappush(self._heap, (deadline, group.arrival, group))
        self._sample_count += len(group.samples)

    def prune(self, train_version: int) -> tuple[list[Sample], list[FreshGroup]]:
        """Take out what would be too old for a version.

        Returns:
            The stale samples, and the groups that nothing is left of.
        """
        stale: list[Sample] = []
        gone: list[FreshGroup] = []
        while self._heap and self._heap[0][0] < train_version:
            group = heappop(self._heap)[2]
            self._sample_count -= len(group.samples)
            oldest = train_version - self._max_staleness
            stale += [sample for sample in group.samples if sample.min_version < oldest]
            group.samples = tuple(s for s in group.samples if s.min_version >= oldest)
            if group.samples:
                self.put(group)
            else:
                gone.append(group)
        return stale, gone

    def take(self, count: int) -> tuple[FreshGroup, ...]:
        """Return up to so many groups, earliest deadline first."""
        groups = tuple(heappop(self._heap)[2] for _ in range(min(count, len(self._heap))))
        self._sample_count -= sum(len(group.samples) for group in groups)
        return groups

    def take_these(self, groups: tuple[FreshGroup, ...]) -> bool:
        """Take out exactly these groups; False, and nothing happens, when one is not here."""
        wanted = {group.arrival for group in groups}
        here = [entry for entry in self._heap if entry[1] in wanted]
        if len(here) != len(wanted):
            return False
        self._heap = [entry for entry in self._heap if entry[1] not in wanted]
        heapify(self._heap)
        self._sample_count -= sum(len(entry[2].samples) for entry in here)
        return True

    def clear(self) -> tuple[FreshGroup, ...]:
        """Take out everything."""
        return self.take(len(self._heap))
