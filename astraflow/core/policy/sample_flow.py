"""Sample flow: the samples of one policy from their issue to the batch that trains on them.

A group is open from its issue until all of it is trained on or dropped: so what may be open bounds
how old a sample is when its turn comes, see `admission`.
"""

from collections.abc import Iterator, Sequence, Set
from datetime import timedelta

from astraflow.core.algorithms.curation import BatchGuards, GroupCompletion
from astraflow.core.algorithms.finding import Faults
from astraflow.core.algorithms.points import Dice
from astraflow.core.batches import IssuedPrompt
from astraflow.core.errors import Reason
from astraflow.core.groups import TrainGroup
from astraflow.core.ids import BatchId, RolloutId
from astraflow.core.policy.accounting import Books
from astraflow.core.policy.admission import PolicyProgress
from astraflow.core.policy.buffers import FreshBuffer, ReplayBuffer
from astraflow.core.policy.leases import Lease, LeaseTable, Lineage, TrainedBatch
from astraflow.core.policy.metrics import batch_metrics
from astraflow.core.samples import AcceptedRollout, FreshGroup
from astraflow.core.settings import PolicySettings, RunSettings
from astraflow.core.status import RolloutPlace


class SampleFlow:
    """Where the samples of one policy are, and where they go.

    Attributes:
        books: Their counts and records.
        buffer: Whole groups, in the order in which they are trained on.
        open_count: Groups with any sample that is in flight, waiting, fresh or leased.
        produced_count: Rollouts accepted.
        entered_count: Of these, kept after filters.
    """

    def __init__(
        self,
        settings: PolicySettings,
        run: RunSettings,
        *,
        progress: PolicyProgress,
        lease_table: LeaseTable,
        lineage: Lineage,
        faults: Faults,
    ) -> None:
        self._policy_id = settings.policy_id
        self._settings = settings
        self._progress = progress
        self._lease_table = lease_table
        self._lineage = lineage
        self.books = Books(settings.policy_id)
        self.buffer = FreshBuffer(
            max_staleness=settings.max_staleness,
            settings=settings.buffer,
            least_groups=settings.groups_per_batch,
        )
        self.replay = ReplayBuffer(
            settings.replay,
            groups_per_batch=settings.groups_per_batch,
            dice=Dice(seed=run.seed, salt=f"replay/{settings.policy_id}"),
            faults=faults,
        )
        self.completion = GroupCompletion(
            settings.policy_id,
            run.rollouts.filters,
            min_group_size=run.rollouts.min_group_size,
            advantages=settings.advantages,
            faults=faults,
        )
        self._guards = BatchGuards(
            settings.guards, max_refusals=settings.max_refusals, faults=faults
        )
        self.open_count = 0
        self.produced_count = self.entered_count = 0
        self._arrivals = 0
        # Numbers of groups: the newest one, and the newest of those that count as lost when stale.
        self._newest = self._spared = 0
        self._lost: list[IssuedPrompt] = []

    @property
    def fresh_per_batch(self) -> int:
        """Fresh groups that the next batch takes; the rest of it is replayed."""
        if not self.replay.is_on:
            return self._settings.groups_per_batch
        again = self.replay.available(self._progress.train_version)
        return self._settings.groups_per_batch - again

    @property
    def open_limit(self) -> int:
        """How many groups may be open: what is trained on before it is too old."""
        settings, left = self._settings, self._progress.steps_left
        batches = (settings.max_staleness + 1) * (settings.steps_per_version or 1)
        batches -= self._progress.steps_since_version
        return (batches if left is None else min(batches, left)) * self.fresh_per_batch

    @property
    def has_slot(self) -> bool:
        return self.open_count < self.open_limit

    @property
    def is_starving(self) -> bool:
        """Whether what is open makes no batch beside those in the trainer's hands."""
        return self.open_count - self._lease_table.leased_groups < self.fresh_per_batch

    def min_version(self, *, is_open: bool) -> int:
        """Return the oldest version that work issued now may be sampled from.

        Args:
            is_open: Whether the group is among the open ones already.
        """
        ahead = max(0, self.open_count - self._lease_table.leased_groups - is_open)
        return self._progress.min_version(batches_ahead=ahead // self.fresh_per_batch)

    def admit(self, group: TrainGroup) -> None:
        self._newest = group.number
        self.books.issue(len(group.slots))
        self.open_count += 1

    def accept(self, group: TrainGroup, index: int, entry: AcceptedRollout) -> None:
        sample = self.books.accept(entry)
        if sample is None:
            return
        sample.min_version = self._progress.versions.weights_number(sample.min_version)
        group.samples.setdefault(self._policy_id, {})[index] = sample
        self.produced_count += 1

    def complete(self, group: TrainGroup, run_time: timedelta) -> None:
        """Move what filters keep of a whole group to the buffer, or drop all of it."""
        kept, drops = self.completion.complete(
            group, train_version=self._progress.train_version, run_time=run_time
        )
        for drop in drops:
            self.books.drop_all(drop.samples, RolloutPlace.WAITING, drop.reason, by=drop.by)
        if not kept:
            self.open_count -= 1
            return
        self._arrivals += 1
        fresh = FreshGroup(
            head=group.head, samples=kept, number=group.number, arrival=self._arrivals
        )
        self.buffer.put(fresh)
        self.books.move_all(kept, RolloutPlace.WAITING, RolloutPlace.FRESH)
        self.entered_count += len(kept)
        self._drop(self.buffer.evict(), RolloutPlace.FRESH, Reason.BUFFER_FULL)

    def withdraw(self, group: TrainGroup, reason: Reason) -> None:
        """Drop an open group that is not whole; the policy no longer trains on it."""
        waiting = group.leave(self._policy_id)
        self.books.drop_all(waiting.values(), RolloutPlace.WAITING, reason)
        if group.open_count:
            self.books.drop(RolloutPlace.IN_FLIGHT, reason, group.open_count)
        self.open_count -= 1

    def lose(self, group: TrainGroup) -> None:
        """Drop an open group that is not whole; its prompt is drawn again."""
        self.withdraw(group, Reason.STALE)
        self._lost.append(IssuedPrompt.of(group.head, group.number))

    def prune(self) -> None:
        """Drop what is too old for the next batch."""
        train_version = self._progress.train_version
        stale, gone = self.buffer.prune(train_version)
        self.books.drop_all(stale, RolloutPlace.FRESH, Reason.STALE)
        self.open_count -= len(gone)
        self.replay.prune(train_version)
        self._lost += [
            IssuedPrompt.of(each.head, each.number) for each in gone if each.number <= self._spared
        ]

    def spare(self) -> None:
        """Count groups as lost that turn stale, for a version came with no batch behind it."""
        self._spared = self._newest

    def take_lost(self) -> list[IssuedPrompt]:
        """Return the prompts of groups that were rolled back, or lost by that, since the last call.

        Returns:
            In the order of their issue.
        """
        lost, self._lost = self._lost, []
        return sorted(lost, key=lambda each: each.number)

    def refuse(self, count: int) -> bool:
        """Let guards look at the next batch of so many fresh groups; drop what is at fault.

        Returns:
            Whether the batch is refused.
        """
        found = self._guards.unfit(self.buffer.peek(count))
        if found is None:
            return False
        name, groups = found
        self.buffer.take_these(groups)
        self._drop(groups, RolloutPlace.FRESH, Reason.FILTERED, by=name)
        return True

    def lease(self, batch_id: BatchId, count: int) -> Lease:
        """Draw a batch of so many fresh groups, at least one; `prune` comes before."""
        train_version = self._progress.train_version
        # In the order of their issue, so that it does not matter which one was whole first.
        groups = tuple(sorted(self.buffer.take(count), key=lambda group: group.number))
        replayed = self.replay.take(train_version, self._settings.groups_per_batch - count)
        metrics = {
            **batch_metrics((*groups, *replayed), train_version=train_version),
            "data/replay/rollouts": float(sum(len(group.samples) for group in replayed)),
            "data/replay/frac": len(replayed) / (len(groups) + len(replayed)),
            **self.buffer.metrics(),
            "buffer/open_groups": float(self.open_count),
        }
        lease = Lease(
            batch_id=batch_id,
            policy_id=self._policy_id,
            version=self._progress.versions.newest_version,
            train_version=train_version,
            groups=groups,
            replayed=replayed,
            replayed_weights=self.replay.loss_weights(replayed),
            metrics=metrics,
        )
        self._lease_table.add(lease)
        self.books.lease(lease)
        return lease

    def reclaim(self, lease: Lease) -> bool:
        """Lease again what a lost lease held; False when some of it is elsewhere."""
        if not self.buffer.take_these(lease.groups):
            return False
        self.books.lease(lease)
        self.replay.regain(lease.replayed)
        self._lease_table.add(lease)
        return True

    def put_back(self, lease: Lease) -> None:
        """Return the groups of a batch to the buffer, where their deadline puts them first."""
        for group in lease.groups:
            self.buffer.put(group)
        self.books.move_all(lease.samples, RolloutPlace.LEASED, RolloutPlace.FRESH)
        self.replay.give_back(lease.replayed)
        self._drop(self.buffer.evict(), RolloutPlace.FRESH, Reason.BUFFER_FULL)

    def drop_lost(self, lease: Lease, rollout_ids: Set[RolloutId]) -> None:
        """Drop rollouts of a batch whose payload is lost; it holds the others from now on."""
        if not rollout_ids:
            return
        lost = [s for s in lease.samples if s.entry.rollout.rollout_id in rollout_ids]
        self.books.drop_all(lost, RolloutPlace.LEASED, Reason.PAYLOAD_LOST)
        arrivals = {
            group.arrival
            for group in lease.replayed
            if any(s.entry.rollout.rollout_id in rollout_ids for s in group.samples)
        }
        self.replay.forget(arrivals)
        self.open_count -= lease.keep_only(without=lost, without_replayed=arrivals)

    def drop_leased(self, lease: Lease, reason: Reason) -> None:
        self._drop(lease.groups, RolloutPlace.LEASED, reason)

    def discard(self, lease: Lease) -> None:
        """Drop the groups of a batch, those of a replay too."""
        self.drop_leased(lease, Reason.BATCH_DISCARDED)
        self.replay.forget(group.arrival for group in lease.replayed)

    def train(self, lease: Lease, step: int) -> None:
        self._lineage.add(lease, step)
        self._lineage.release(self._progress.oldest_to_restore)
        self.open_count -= len(lease.groups)
        self.replay.use(lease.groups, lease.replayed)
        self.books.train(lease, step=step)

    def untrain(self, undone: Sequence[TrainedBatch]) -> None:
        """Count batches as not trained; what is new enough goes back to the buffer.

        Args:
            undone: That `lineage.cut` returned, newest first.
        """
        for batch in undone:
            self.replay.forget(batch.arrivals)
            self.books.untrain(batch)
            kept = set[int]() if batch.lease is None else self._put_back_trained(batch.lease)
            self._lost += [each for each in batch.prompts if each.number not in kept]
        self.spare()
        self.prune()

    @property
    def held_groups(self) -> Iterator[FreshGroup]:
        """All whole groups that are or may be trained on, some of them more than once."""
        yield from self.buffer
        yield from self.replay
        for lease in (*self._lease_table.leases.values(), *self._lineage.leases):
            yield from lease.groups
            yield from lease.replayed

    def close(self) -> None:
        """Drop what is in the buffer: nothing is trained on any more."""
        self._drop(self.buffer.take(len(self.buffer)), RolloutPlace.FRESH, Reason.RUN_ENDED)
        self.replay.clear()

    def metrics(self) -> dict[str, float]:
        dropped = sorted(self.books.drops_by_reason.items())
        return {
            **{f"buffer/dropped/{reason.lower()}": float(count) for reason, count in dropped},
            **self.completion.metrics(),
            **self._guards.metrics(),
            **self.replay.metrics(),
        }

    def _put_back_trained(self, lease: Lease) -> set[int]:
        """Return groups to the buffer as far as they may be open; drop the others.

        Returns:
            The numbers of those in the buffer.
        """
        self.replay.undo(lease.replayed)
        for group in lease.replayed:
            batch = self._lineage.last_use(group.arrival)
            if batch is not None:
                self.books.note_use(group.samples, batch)
        kept: set[int] = set()
        for group in lease.groups:
            if not self.has_slot:
                self.books.drop_all(group.samples, RolloutPlace.LEASED, Reason.BUFFER_FULL)
                continue
            self.buffer.put(group)
            self.books.move_all(group.samples, RolloutPlace.LEASED, RolloutPlace.FRESH)
            self.open_count += 1
            kept.add(group.number)
        return kept

    def _drop(
        self, groups: Sequence[FreshGroup], place: RolloutPlace, reason: Reason, *, by: str = ""
    ) -> None:
        """Drop open groups with all their samples."""
        if not groups:
            return
        samples = [sample for group in groups for sample in group.samples]
        self.books.drop_all(samples, place, reason, by=by)
        self.open_count -= len(groups)
