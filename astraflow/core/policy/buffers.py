"""Buffers of a policy: whole groups in the order in which they are trained on, and for replay.

A replayed group stays trained in the books: replay is a count of uses, not a place. A batch of B
groups has up to ratio * B replayed ones and is filled up with fresh ones, at least one, so that
with ratio r a group is used 1 / (1 - r) times on average, as long as enough may be replayed. Groups
are replayed whole: what a batch is short of by that, later ones have more.

Example:
    Batches of 16 groups, ratio 0.3: 4.8 are due in each, so five batches have 4, 5, 5, 5 and 5.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, nsmallest
from math import isfinite
from operator import index

from astraflow.core.algorithms.finding import Faults, make
from astraflow.core.algorithms.points import Dice, ReplayOrder, UsedGroup
from astraflow.core.samples import FreshGroup, Sample
from astraflow.core.settings import BufferOrder, BufferSettings, ReplaySettings


class FreshBuffer:
    """Groups by deadline, the last version that may train on them, or by arrival.

    The law: what `take` returns was sampled at most `max_staleness` versions before the
    version that trains on it, once `prune` was called for that version.

    Example:
        With max_staleness 2, groups sampled from versions 5, 3 and 4 are taken for version 5
        as 3, 4, 5; first in, first out as 5, 3, 4. For version 6 the samples of 3 are stale:
        `prune` takes them out.

    Attributes:
        nbytes: Bytes of all groups, as `AcceptedRollout.nbytes`.
    """

    def __init__(
        self, *, max_staleness: int, settings: BufferSettings | None = None, least_groups: int = 1
    ) -> None:
        """Begin empty; `least_groups` are never evicted for want of room."""
        self._max_staleness = max_staleness
        self._settings = settings or BufferSettings()
        self._least_groups = least_groups
        self._heap: list[tuple[int, int, FreshGroup]] = []
        self.sample_count = 0
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[FreshGroup]:
        """Return all groups, in no order."""
        return (group for _, _, group in self._heap)

    def put(self, group: FreshGroup) -> None:
        is_edf = self._settings.order is BufferOrder.EDF
        key = group.min_version if is_edf else 0
        heappush(self._heap, (key, group.arrival, group))
        self._count(group, 1)

    def evict(self) -> list[FreshGroup]:
        """Take out what there is no room for: what would be trained on next has least to lose."""
        gone: list[FreshGroup] = []
        most, most_nbytes = self._settings.max_groups, self._settings.max_nbytes
        while len(self._heap) > self._least_groups and (
            (most is not None and len(self._heap) > most)
            or (most_nbytes is not None and self.nbytes > most_nbytes)
        ):
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

    def metrics(self) -> dict[str, float]:
        return {"buffer/size": float(self.sample_count), "buffer/nbytes": float(self.nbytes)}

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

    def _count(self, group: FreshGroup, sign: int) -> None:
        self.sample_count += sign * len(group.samples)
        self.nbytes += sign * group.nbytes


@dataclass(slots=True, kw_only=True, eq=False)
class _Kept:
    group: FreshGroup
    use_count: int = 1
    is_leased: bool = False
    loss_weight: float = 1.0


class ReplayBuffer:
    """What one policy may train on again.

    Attributes:
        is_on: Whether anything is ever replayed.

    Example:
        Batches of 10 groups, ratio 0.3. The first batch has 10 fresh groups. Of these the second
        one has 3 again, with 7 fresh ones; with max_uses 2 the three are then forgotten.
    """

    def __init__(
        self, settings: ReplaySettings, *, groups_per_batch: int, dice: Dice, faults: Faults
    ) -> None:
        self._settings = settings
        self._groups_per_batch = groups_per_batch
        self.is_on = settings.ratio > 0 and groups_per_batch > 1
        self._batch_count = 0
        self._order = make(ReplayOrder, settings.order)
        self._dice = dice
        self._faults = faults
        self._kept: dict[int, _Kept] = {}
        self.nbytes = 0
        # Groups that nobody holds, by their oldest version: asked for with every event.
        self._free = Counter[int]()
        self._use_count = self._evicted_count = 0

    def __iter__(self) -> Iterator[FreshGroup]:
        return (kept.group for kept in self._kept.values())

    @property
    def target(self) -> int:
        """Groups of the next batch that are replayed, at most."""
        due = self._due(self._batch_count + 1) - self._due(self._batch_count)
        return min(due, self._groups_per_batch - 1)

    @property
    def sample_count(self) -> int:
        return sum(len(kept.group.samples) for kept in self._kept.values())

    def available(self, train_version: int) -> int:
        """Return how many groups a batch for a version would have again."""
        if not self._free:
            return 0
        oldest = train_version - self._settings.max_staleness
        count = sum(count for version, count in self._free.items() if version >= oldest)
        return min(self.target, count)

    def take(self, train_version: int, count: int) -> tuple[FreshGroup, ...]:
        """Return up to so many groups for the next batch, and have nobody else take them."""
        count = min(count, self.available(train_version))
        self._batch_count += 1
        if not count:
            return ()
        found = self._eligible(train_version)
        groups = [
            UsedGroup(
                group=kept.group,
                use_count=kept.use_count,
                staleness=train_version - kept.group.min_version,
            )
            for kept in found
        ]
        picked = self._faults.call("replay order", {}, self._pick, groups, count)
        for place, weight in picked.items():
            found[place].loss_weight = weight
        taken = [found[place] for place in picked]
        self._lease(taken, is_leased=True)
        return tuple(kept.group for kept in taken)

    def loss_weights(self, groups: Sequence[FreshGroup]) -> tuple[float, ...]:
        """Return the factor on the loss of each group that was just taken."""
        return tuple(kept.loss_weight for kept in self._here(groups))

    def use(self, fresh: Sequence[FreshGroup], again: Sequence[FreshGroup]) -> None:
        """Note that groups were trained on, for the first time or again."""
        self._use_count += len(again)
        here = self._here(again)
        self._lease(here, is_leased=False)
        for kept in here:
            kept.use_count += 1
            if kept.use_count >= self._settings.max_uses:
                self._forget(kept)
        if self.is_on and self._settings.max_uses > 1:
            for group in fresh:
                self._kept[group.arrival] = _Kept(group=group)
                self._free[group.min_version] += 1
                self.nbytes += group.nbytes
            self._evict()

    def give_back(self, groups: Sequence[FreshGroup]) -> None:
        """Note that a batch was not trained on."""
        self._lease(self._here(groups), is_leased=False)

    def regain(self, groups: Sequence[FreshGroup]) -> None:
        """Note that a batch is trained on after all."""
        self._lease(self._here(groups), is_leased=True)

    def undo(self, again: Sequence[FreshGroup]) -> None:
        """Note that the uses of one batch do not count."""
        for kept in self._here(again):
            kept.use_count -= 1

    def forget(self, arrivals: Iterable[int]) -> None:
        """Let nobody train on groups again, named by their arrival."""
        for arrival in arrivals:
            if arrival in self._kept:
                self._forget(self._kept[arrival])

    def prune(self, train_version: int) -> None:
        """Forget what is too old for a version and all that follow."""
        oldest = train_version - self._settings.max_staleness
        for kept in [k for k in self._kept.values() if k.group.min_version < oldest]:
            if not kept.is_leased:
                self._forget(kept)

    def clear(self) -> None:
        self._kept.clear()
        self._free.clear()
        self.nbytes = 0

    def metrics(self) -> Mapping[str, float]:
        if not self.is_on:
            return {}
        return {
            "data/replay/groups": float(len(self._kept)),
            "data/replay/nbytes": float(self.nbytes),
            "data/replay/uses": float(self._use_count),
            "data/replay/evicted": float(self._evicted_count),
        } | self._faults.metrics("data/replay", self._order)

    def _due(self, batch_count: int) -> int:
        """Return how many groups so many batches have again."""
        due = batch_count * self._settings.ratio * self._groups_per_batch
        # 0.3 * 10 is a little less than 3.
        return int(due + 1e-6)

    def _pick(self, groups: Sequence[UsedGroup], count: int) -> dict[int, float]:
        """Return the weights of what is picked, by position."""
        found = dict.fromkeys(map(index, self._order.pick(groups, count, self._dice)))
        picked = sorted([place for place in found if 0 <= place < len(groups)][:count])
        weights = [float(weight) for weight in self._order.loss_weights(groups, picked)]
        if not all(isfinite(weight) and weight >= 0 for weight in weights):
            raise ValueError(f"loss weights {weights}")
        return dict(zip(picked, weights, strict=True))

    def _eligible(self, train_version: int) -> list[_Kept]:
        oldest = train_version - self._settings.max_staleness
        return [
            kept
            for kept in self._kept.values()
            if not kept.is_leased and kept.group.min_version >= oldest
        ]

    def _here(self, groups: Sequence[FreshGroup]) -> list[_Kept]:
        return [self._kept[group.arrival] for group in groups if group.arrival in self._kept]

    def _lease(self, kept: Sequence[_Kept], *, is_leased: bool) -> None:
        for each in kept:
            if each.is_leased is not is_leased:
                each.is_leased = is_leased
                self._count_free(each, -1 if is_leased else 1)

    def _forget(self, kept: _Kept) -> None:
        if not kept.is_leased:
            self._count_free(kept, -1)
        del self._kept[kept.group.arrival]
        self.nbytes -= kept.group.nbytes

    def _count_free(self, kept: _Kept, change: int) -> None:
        version = kept.group.min_version
        self._free[version] += change
        if not self._free[version]:
            del self._free[version]

    def _evict(self) -> None:
        """Forget the oldest ones beyond the bounds."""
        for kept in list(self._kept.values()):
            is_over = len(self._kept) > self._settings.max_groups
            if not (is_over or self.nbytes > self._settings.max_nbytes):
                return
            if not kept.is_leased:
                self._forget(kept)
                self._evicted_count += 1
