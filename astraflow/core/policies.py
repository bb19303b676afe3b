"""One policy: its books, its buffer, its versions, its batches, and how samples move through."""

from collections.abc import Iterator, Mapping, Sequence, Set
from datetime import datetime, timedelta

from astraflow.core.accounting import SampleAccounting
from astraflow.core.admission import OpenGroups, PolicyProgress
from astraflow.core.algorithms.finding import Faults
from astraflow.core.algorithms.points import Dice
from astraflow.core.batches import AckBatch, EndCause
from astraflow.core.buffer import FreshBuffer
from astraflow.core.curation import BatchGuards, GroupCompletion
from astraflow.core.errors import AstraflowError, Failure, Reason
from astraflow.core.groups import TrainGroup
from astraflow.core.ids import BatchId, PolicyId, RolloutId
from astraflow.core.leases import Lease, LeaseTable
from astraflow.core.lineage import IssuedPrompt, Lineage, TrainedBatch
from astraflow.core.members import ModelIdentity
from astraflow.core.metrics import Window, batch_metrics, drop_metrics, replay_metrics, time_metrics
from astraflow.core.replay import ReplayBuffer
from astraflow.core.samples import AcceptedRollout, FreshGroup
from astraflow.core.settings import PolicySettings, RunSettings
from astraflow.core.status import RolloutPlace
from astraflow.core.versions import VersionLedger


class PolicyState:
    """The state of one policy.

    Attributes:
        identity: Of its model, once a member named it.
        lease_table: Batches at the trainer.
        progress: Its steps and its versions.
        books: Where its samples are.
        window: How training went lately.
        produced_count: Rollouts accepted.
        entered_count: Of these, kept after filters.
        open: Its open groups.
        end: Why its data ended; None: it goes on.
        end_time: When.
        ended_ranks: Ranks that were sent the end of the data.
        load_failure: Why a RaaS could not load a version, the last one.
        departure_time: When its last trainer was last seen; None: it has one, or never had.
        metrics: Of the last batch that was trained on.
        replay: What it may train on again.
        completion: Of its groups.
        lineage: What its weights were trained on.
    """

    def __init__(self, settings: PolicySettings, run: RunSettings, *, faults: Faults) -> None:
        self.settings = settings
        self.policy_id = settings.policy_id
        self.identity = ModelIdentity()
        self.lease_table = LeaseTable(settings.policy_id)
        self.progress = PolicyProgress(
            settings, self.lease_table, kept_version_count=run.kept_version_count
        )
        self._accounting = SampleAccounting(settings.policy_id)
        self.books = self._accounting.books
        self.window = Window()
        self.produced_count = self.entered_count = 0
        self.end: EndCause | None = None
        self.end_time: datetime | None = None
        self.ended_ranks: set[int] = set()
        self.departure_time: datetime | None = None
        self.load_failure: Failure | None = None
        self.replay = ReplayBuffer(
            settings.replay,
            groups_per_batch=settings.groups_per_batch,
            dice=Dice(seed=run.seed, salt=f"replay/{settings.policy_id}"),
            faults=faults,
        )
        self.open = OpenGroups(settings, self.progress, self.lease_table, self.replay)
        self._buffer = FreshBuffer(
            max_staleness=settings.max_staleness,
            settings=settings.buffer,
            least_groups=settings.groups_per_batch,
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
        self._arrivals = 0
        # Numbers of groups: the newest one, and the newest of those that count as lost when stale.
        self._newest = self._spared = 0
        self._lost: list[IssuedPrompt] = []
        self.metrics: Mapping[str, float] = {}
        self.lineage = Lineage(settings.policy_id)

    @property
    def versions(self) -> VersionLedger:
        """What was published."""
        return self.progress.versions

    @property
    def fresh_groups(self) -> int:
        """Whole groups in the buffer."""
        return len(self._buffer)

    @property
    def buffer_nbytes(self) -> int:
        """Bytes of the groups in the buffer."""
        return self._buffer.nbytes

    def admit(self, group: TrainGroup) -> None:
        """Enter the samples of a new group."""
        self._newest = group.number
        self.books.issue(group.size)
        self.open.count += 1

    def accept(self, group: TrainGroup, index: int, entry: AcceptedRollout) -> None:
        """Take what one rollout has for this policy."""
        sample = self._accounting.accept(entry)
        if sample is None:
            return
        sample.min_version = self.versions.weights_number(sample.min_version)
        group.samples.setdefault(self.policy_id, {})[index] = sample
        self.produced_count += 1

    def give_up(self, reason: Reason) -> None:
        """Drop a sample that no rollout will come of."""
        self.books.drop(RolloutPlace.IN_FLIGHT, reason)

    def complete(self, group: TrainGroup, run_time: timedelta) -> None:
        """Move what filters keep of a whole group to the buffer, or drop all of it."""
        done = self.completion.complete(
            group, train_version=self.progress.train_version, run_time=run_time
        )
        for drop in done.drops:
            self._accounting.drop(drop.samples, RolloutPlace.WAITING, drop.reason, by=drop.by)
        if not done.kept:
            self.open.count -= 1
            return
        self._arrivals += 1
        fresh = FreshGroup(
            head=group.head, samples=done.kept, number=group.number, arrival=self._arrivals
        )
        self._buffer.put(fresh)
        self._accounting.move(done.kept, RolloutPlace.WAITING, RolloutPlace.FRESH)
        self.entered_count += len(done.kept)
        self._evict()

    def withdraw(self, group: TrainGroup, reason: Reason) -> None:
        """Drop an open group that is not whole."""
        waiting = group.samples.pop(self.policy_id, {})
        self._accounting.drop(waiting.values(), RolloutPlace.WAITING, reason)
        if group.open_count:
            self.books.drop(RolloutPlace.IN_FLIGHT, reason, group.open_count)
        self.open.count -= 1

    def lose(self, group: TrainGroup) -> None:
        """Drop an open group that is not whole; its prompt is drawn again."""
        self.withdraw(group, Reason.STALE)
        self._lost.append(IssuedPrompt.of(group))

    def prune(self) -> None:
        """Drop what is too old for the next batch."""
        stale, gone = self._buffer.prune(self.progress.train_version)
        self._accounting.drop(stale, RolloutPlace.FRESH, Reason.STALE)
        self.open.count -= len(gone)
        self.replay.prune(self.progress.train_version)
        self._lost += [IssuedPrompt.of(each) for each in gone if each.number <= self._spared]

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
        found = self._guards.unfit(self._buffer.peek(count))
        if found is None:
            return False
        name, groups = found
        self._buffer.take_these(groups)
        self._drop(groups, RolloutPlace.FRESH, Reason.FILTERED, by=name)
        return True

    def lease(self, batch_id: BatchId, count: int, now: datetime) -> Lease:
        """Draw a batch of so many fresh groups, at least one; `prune` comes before."""
        train_version = self.progress.train_version
        # In the order of their issue, so that it does not matter which one was whole first.
        groups = tuple(sorted(self._buffer.take(count), key=lambda group: group.number))
        replayed = self.replay.take(train_version, self.settings.groups_per_batch - count)
        metrics = {
            **batch_metrics((*groups, *replayed), train_version=train_version),
            **replay_metrics(groups, replayed),
            **self._buffer.metrics(),
            "buffer/open_groups": float(self.open.count),
        }
        lease = Lease(
            batch_id=batch_id,
            policy_id=self.policy_id,
            version=self.versions.newest_version,
            train_version=train_version,
            groups=groups,
            replayed=replayed,
            replayed_weights=self.replay.loss_weights(replayed),
            metrics=metrics,
        )
        self.lease_table.leases[batch_id] = lease
        self.window.begin(now)
        self._accounting.lease(lease)
        return lease

    def reclaim(self, lease: Lease) -> bool:
        """Lease again what a lost lease held; False when some of it is elsewhere."""
        if not self._buffer.take_these(lease.groups):
            return False
        self._accounting.lease(lease)
        self.replay.regain(lease.replayed)
        return True

    def put_back(self, lease: Lease) -> None:
        """Return the groups of a batch to the buffer, where their deadline puts them first."""
        if self.end is not None:
            self._drop(lease.groups, RolloutPlace.LEASED, Reason.RUN_ENDED)
            return
        for group in lease.groups:
            self._buffer.put(group)
        self._accounting.move(lease.samples, RolloutPlace.LEASED, RolloutPlace.FRESH)
        self.replay.give_back(lease.replayed)
        self._evict()

    def drop_lost(self, lease: Lease, rollout_ids: Set[RolloutId]) -> None:
        """Drop rollouts of a batch whose payload is lost; it holds the others from now on."""
        if not rollout_ids:
            return
        lost = [s for s in lease.samples if s.entry.rollout.rollout_id in rollout_ids]
        self._accounting.drop(lost, RolloutPlace.LEASED, Reason.PAYLOAD_LOST)
        for group in lease.groups:
            group.samples = tuple(each for each in group.samples if each not in lost)
        left = tuple(group for group in lease.groups if group.samples)
        self.open.count -= len(lease.groups) - len(left)
        lease.groups = left
        is_lost = {
            group.arrival
            for group in lease.replayed
            if any(s.entry.rollout.rollout_id in rollout_ids for s in group.samples)
        }
        self.replay.forget(is_lost)
        lease.replayed = tuple(each for each in lease.replayed if each.arrival not in is_lost)

    @property
    def held_groups(self) -> Iterator[FreshGroup]:
        """All whole groups that are or may be trained on, some of them more than once."""
        yield from self._buffer
        yield from self.replay
        for lease in (*self.lease_table.leases.values(), *self.lineage.leases):
            yield from lease.groups
            yield from lease.replayed

    def discard(self, lease: Lease) -> None:
        """Drop the groups of a batch."""
        self._drop(lease.groups, RolloutPlace.LEASED, Reason.BATCH_DISCARDED)
        self.replay.forget(group.arrival for group in lease.replayed)

    def roll_back(self, count: int, step: int) -> list[TrainedBatch]:
        """Count the last batches as not trained: their weights are lost.

        What is new enough goes back to the buffer as far as groups may be open; the rest is
        dropped. The next version is that of the weights which are left.

        Args:
            count: Batches.
            step: Optimizer steps that are left.

        Returns:
            Those that were rolled back, newest first; none when the data has ended.
        """
        if self.end is not None:
            return []
        undone = self.lineage.cut(count)
        self.progress.roll_back(len(undone), step)
        for batch in undone:
            self.replay.forget(batch.arrivals)
            self._accounting.untrain(batch)
            kept = set[int]() if batch.lease is None else self._put_back_trained(batch.lease)
            self._lost += [each for each in batch.prompts if each.number not in kept]
        self.spare()
        self.prune()
        return undone

    def _put_back_trained(self, lease: Lease) -> set[int]:
        """Return groups to the buffer as far as they may be open; drop the others.

        Returns:
            The numbers of those in the buffer.
        """
        self.replay.undo(lease.replayed)
        kept: set[int] = set()
        for group in lease.groups:
            if not self.open.has_slot:
                self._accounting.drop(group.samples, RolloutPlace.LEASED, Reason.BUFFER_FULL)
                continue
            self._buffer.put(group)
            self._accounting.move(group.samples, RolloutPlace.LEASED, RolloutPlace.FRESH)
            self.open.count += 1
            kept.add(group.number)
        return kept

    def consume(self, lease: Lease, ack: AckBatch, now: datetime) -> dict[str, float]:
        """Count the groups of a batch as trained; return the batch's metrics."""
        step = self.progress.note_batch(ack.step)
        self.lineage.add(lease, step)
        self.lineage.release(self.progress.oldest_to_restore)
        self.open.count -= len(lease.groups)
        self.replay.use(lease.groups, lease.replayed)
        self._accounting.train(lease, step=step)
        consumed = lease.consumed(now, wait_s=ack.wait_s, train_s=ack.train_s)
        self.window.add(consumed)
        return {
            **lease.metrics,
            **drop_metrics(self.books.drops),
            **time_metrics(consumed.token_count, wait_s=ack.wait_s, train_s=ack.train_s),
            **self.completion.metrics(),
            **self._guards.metrics(),
            **self.replay.metrics(),
        }

    def retire(self, cause: EndCause, now: datetime) -> None:
        """End the data: what is in the buffer is dropped."""
        self._drop(self._buffer.clear(), RolloutPlace.FRESH, Reason.RUN_ENDED)
        self.replay.clear()
        self.end, self.end_time = cause, now

    def _evict(self) -> None:
        """Drop what the buffer has no room for."""
        self._drop(self._buffer.evict(), RolloutPlace.FRESH, Reason.BUFFER_FULL)

    def _drop(
        self, groups: Sequence[FreshGroup], place: RolloutPlace, reason: Reason, *, by: str = ""
    ) -> None:
        """Drop open groups with all their samples."""
        samples = [sample for group in groups for sample in group.samples]
        self._accounting.drop(samples, place, reason, by=by)
        self.open.count -= len(groups)


def find_policy(policies: Mapping[PolicyId, PolicyState], policy_id: PolicyId) -> PolicyState:
    """Return a policy of a run.

    Raises:
        AstraflowError: POLICY_UNKNOWN.
    """
    policy = policies.get(policy_id)
    if policy is None:
        known = ", ".join(policies)
        raise AstraflowError(
            Reason.POLICY_UNKNOWN, f"the run has no policy '{policy_id}', only {known}"
        )
    return policy


def newest_versions(
    policies: Mapping[PolicyId, PolicyState], policy_ids: tuple[PolicyId, ...]
) -> dict[PolicyId, int] | None:
    """Return the newest version of each policy that the pool may see; None: one has none."""
    newest = {p: policies[p].versions.shown_version for p in policy_ids}
    return None if min(newest.values()) < 0 else newest
