"""One policy: its books, its buffer, its versions, its batches, and how samples move through."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta

from astraflow.core import admission
from astraflow.core.algorithms.faults import Faults
from astraflow.core.algorithms.plug_in import Dice
from astraflow.core.batch_metrics import batch_metrics, drop_metrics, time_metrics
from astraflow.core.batches import BatchGroup, EndCause
from astraflow.core.books import Books
from astraflow.core.buffer import FreshBuffer
from astraflow.core.completion import Completion
from astraflow.core.errors import Failure, Reason
from astraflow.core.groups import TrainGroup
from astraflow.core.guarding import Guarding
from astraflow.core.ids import BatchId
from astraflow.core.leases import Desk, Lease
from astraflow.core.lineage import Lineage, TrainedBatch
from astraflow.core.members import ModelIdentity
from astraflow.core.records import Entry
from astraflow.core.replay import Replay
from astraflow.core.samples import FreshGroup, Sample, sample_of
from astraflow.core.settings import PolicySettings, RunSettings
from astraflow.core.status import RolloutPlace, RolloutPlacement
from astraflow.core.version_ledger import VersionLedger
from astraflow.core.window import Consumed, Window


class Policy:
    """The state of one policy.

    Attributes:
        identity: Of its model, once a member named it.
        books: Where its samples are.
        versions: What was published.
        desk: Batches at the trainer.
        step: Optimizer steps acknowledged.
        consumed_count: Batches trained on.
        produced_count: Rollouts accepted.
        entered_count: Of these, kept after filters.
        open_groups: Groups with any sample that is in flight, waiting, fresh or leased.
        end: Why its data ended; None: it goes on.
        end_time: When.
        ended_ranks: Ranks that were told so.
        load_failure: Why a RaaS could not load a version, the last one.
        gone_time: When its last trainer was last heard of; None: it has one, or never had.
        metrics: Of the last batch that was trained on.
        is_asked: Whether its trainer was asked for a version that has not come.
        replay: What it may train on again.
        completion: Of its groups.
        lineage: What its weights were trained on.
    """

    def __init__(self, settings: PolicySettings, run: RunSettings, *, faults: Faults) -> None:
        self.settings = settings
        self.policy_id = settings.policy_id
        self.identity = ModelIdentity()
        self.books = Books(settings.policy_id)
        self.versions = VersionLedger(settings.policy_id, kept_count=run.kept_version_count)
        self.desk = Desk(settings.policy_id)
        self.window = Window()
        self.step = 0
        self.consumed_count = 0
        self.produced_count = 0
        self.entered_count = 0
        self.open_groups = 0
        self.end: EndCause | None = None
        self.end_time: datetime | None = None
        self.ended_ranks: set[int] = set()
        self.gone_time: datetime | None = None
        self.load_failure: Failure | None = None
        self.is_asked = False
        self.replay = Replay(
            settings.replay,
            groups_per_batch=settings.groups_per_batch,
            dice=Dice(seed=run.seed, salt=f"replay/{settings.policy_id}"),
            faults=faults,
        )
        self._buffer = FreshBuffer(
            max_staleness=settings.max_staleness,
            settings=settings.buffer,
            least_groups=settings.groups_per_batch,
        )
        self.completion = Completion(
            settings.policy_id,
            run.rollouts.filters,
            min_group_size=run.rollouts.min_group_size,
            scale_by_std=settings.scale_by_std,
            faults=faults,
        )
        self._guarding = Guarding(
            settings.guards, max_refusals=settings.max_refusals, faults=faults
        )
        self._arrivals = 0
        self.metrics: Mapping[str, float] = {}
        self.lineage = Lineage(settings.policy_id)
        self._is_restoring = False

    @property
    def train_version(self) -> int:
        """Version that the next batch trains on; before the first publication 0."""
        return max(0, self._version_after(len(self.desk.leases)))

    @property
    def next_version(self) -> int:
        """Version that comes of the next batch, or the same where it makes none."""
        return self._version_after(len(self.desk.leases) + 1)

    @property
    def has_more(self) -> bool:
        """Whether a version published now, or after the step in progress, had more steps."""
        newest = self.versions.newest
        return newest is None or self.step + len(self.desk.leases) > newest.step

    @property
    def made_version(self) -> int:
        """Version that the acknowledged steps make; -1: not even the first one."""
        return self._version_after(0)

    @property
    def fresh_groups(self) -> int:
        """Whole groups in the buffer."""
        return len(self._buffer)

    @property
    def buffer_nbytes(self) -> int:
        """Bytes of the groups in the buffer."""
        return self._buffer.nbytes

    @property
    def fresh_per_batch(self) -> int:
        """Fresh groups that the next batch takes; the rest of it is replayed."""
        if not self.replay.target:
            return self.settings.groups_per_batch
        return self.settings.groups_per_batch - self.replay.available(self.train_version)

    @property
    def open_limit(self) -> int:
        """Groups that may be open."""
        return admission.open_limit(
            groups_per_batch=self.fresh_per_batch,
            max_staleness=self.settings.max_staleness,
            steps_left=self.steps_left,
            steps_per_version=self.settings.steps_per_version,
        )

    @property
    def has_slot(self) -> bool:
        """Whether another group may be opened."""
        return self.open_groups < self.open_limit

    @property
    def is_starving(self) -> bool:
        """Whether what is open makes no batch beside those in the trainer's hands."""
        ahead = self.open_groups - self.desk.leased_groups
        return ahead < self.fresh_per_batch

    @property
    def steps_left(self) -> int | None:
        """Batches still to be trained on; None: no limit."""
        steps = self.settings.step_count
        return None if steps is None else max(0, steps - self.consumed_count)

    def min_version(self, *, is_open: bool) -> int:
        """Return the oldest version that work issued now may be sampled from.

        Args:
            is_open: Whether the group is among the open ones already.
        """
        ahead = self.open_groups - self.desk.leased_groups - is_open
        train_version = self._version_after(
            len(self.desk.leases), batches_ahead=max(0, ahead) // self.fresh_per_batch
        )
        return admission.min_version(
            train_version=max(0, train_version), max_staleness=self.settings.max_staleness
        )

    def admit(self, group: TrainGroup) -> None:
        """Enter the samples of a new group."""
        self.books.issue(group.size)
        self.open_groups += 1

    def accept(self, group: TrainGroup, index: int, entry: Entry) -> None:
        """Take what one rollout has for this policy."""
        sample = sample_of(entry, self.policy_id)
        if sample is None:
            self.books.drop(RolloutPlace.IN_FLIGHT, Reason.FILTERED, by="no_trajectory")
            entry.placements[self.policy_id] = self._dropped(Reason.FILTERED, "no_trajectory")
            return
        self.books.move(RolloutPlace.IN_FLIGHT, RolloutPlace.WAITING)
        sample.place(self.policy_id, RolloutPlace.WAITING)
        group.samples.setdefault(self.policy_id, {})[index] = sample
        self.produced_count += 1

    def give_up(self, reason: Reason) -> None:
        """Drop a sample that no rollout will come of."""
        self.books.drop(RolloutPlace.IN_FLIGHT, reason)

    def complete(self, group: TrainGroup, run_time: timedelta) -> None:
        """Move what filters keep of a whole group to the buffer, or drop all of it."""
        done = self.completion.complete(group, train_version=self.train_version, run_time=run_time)
        for drop in done.drops:
            self._drop(drop.samples, RolloutPlace.WAITING, drop.reason, by=drop.by)
        if not done.kept:
            self.open_groups -= 1
            return
        self._arrivals += 1
        self._buffer.put(
            FreshGroup(
                head=_head(group),
                samples=done.kept,
                number=group.number,
                arrival=self._arrivals,
            )
        )
        self._move(done.kept, RolloutPlace.WAITING, RolloutPlace.FRESH)
        self.entered_count += len(done.kept)
        self._evict()

    def withdraw(self, group: TrainGroup, reason: Reason) -> None:
        """Drop an open group that is not whole."""
        waiting = list(group.samples.pop(self.policy_id, {}).values())
        self._drop(waiting, RolloutPlace.WAITING, reason)
        if group.open_count:
            self.books.drop(RolloutPlace.IN_FLIGHT, reason, group.open_count)
        self.open_groups -= 1

    def prune(self) -> None:
        """Drop what is too old for the next batch."""
        stale, gone = self._buffer.prune(self.train_version)
        self._drop(stale, RolloutPlace.FRESH, Reason.STALE)
        self.open_groups -= len(gone)
        self.replay.prune(self.train_version)

    def refuse(self, count: int) -> bool:
        """Let guards look at the next batch of so many fresh groups; drop what is at fault.

        Returns:
            Whether the batch is refused.
        """
        found = self._guarding.unfit(self._buffer.peek(count))
        if found is None:
            return False
        name, groups = found
        self._buffer.take_these(groups)
        samples = [sample for group in groups for sample in group.samples]
        self._drop(samples, RolloutPlace.FRESH, Reason.FILTERED, by=name)
        self.open_groups -= len(groups)
        return True

    def lease(self, batch_id: BatchId, count: int, now: datetime) -> Lease:
        """Draw a batch of so many fresh groups, at least one; `prune` comes before."""
        train_version = self.train_version
        # In the order of their issue, so that it does not matter which one was whole first.
        groups = tuple(sorted(self._buffer.take(count), key=lambda group: group.number))
        room = self.settings.groups_per_batch - count
        replayed = self.replay.take(train_version, room)
        metrics = batch_metrics((*groups, *replayed), train_version=train_version) | {
            "buffer/size": float(self._buffer.sample_count),
            "buffer/open_groups": float(self.open_groups),
            "buffer/nbytes": float(self._buffer.nbytes),
            "data/replay/rollouts": float(sum(len(group.samples) for group in replayed)),
            "data/replay/frac": len(replayed) / (len(groups) + len(replayed)),
        }
        lease = Lease(
            batch_id=batch_id,
            policy_id=self.policy_id,
            version=self.versions.newest_version,
            train_version=train_version,
            groups=groups,
            replayed=replayed,
            metrics=metrics,
        )
        self.desk.leases[batch_id] = lease
        self.window.begin(now)
        self._move(lease.samples, RolloutPlace.FRESH, RolloutPlace.LEASED, batch_id=batch_id)
        return lease

    def reclaim(self, lease: Lease) -> bool:
        """Lease again what a lost lease held; False when some of it is elsewhere."""
        if not self._buffer.take_these(lease.groups):
            return False
        self._move(lease.samples, RolloutPlace.FRESH, RolloutPlace.LEASED, batch_id=lease.batch_id)
        self.replay.regain(lease.replayed)
        return True

    def put_back(self, lease: Lease) -> None:
        """Return the groups of a batch to the buffer, where their deadline puts them first."""
        if self.end is not None:
            self._drop(lease.samples, RolloutPlace.LEASED, Reason.RUN_ENDED)
            self.open_groups -= len(lease.groups)
            return
        for group in lease.groups:
            self._buffer.put(group)
        self._move(lease.samples, RolloutPlace.LEASED, RolloutPlace.FRESH)
        self.replay.give_back(lease.replayed)
        self._evict()

    def discard(self, lease: Lease) -> None:
        """Drop the groups of a batch."""
        self._drop(lease.samples, RolloutPlace.LEASED, Reason.BATCH_DISCARDED)
        self.open_groups -= len(lease.groups)
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
        self.step = step
        newest = self.versions.newest
        self._is_restoring = newest is not None and newest.step > step
        undone = self.lineage.cut(count)
        self.consumed_count -= len(undone)
        for batch in undone:
            self.books.move(RolloutPlace.TRAINED, RolloutPlace.LEASED, batch.sample_count)
            self.books.replayed -= batch.replayed_count
            self.replay.forget(batch.arrivals)
            if batch.lease is None:
                self.books.drop(RolloutPlace.LEASED, Reason.STALE, batch.sample_count)
            else:
                self._undo(batch.lease)
        self.prune()
        return undone

    def _undo(self, lease: Lease) -> None:
        for row in lease.rows:
            row.use_count -= 1
        self.replay.undo(lease.replayed)
        for group in lease.groups:
            samples = group.samples
            if self.open_groups >= self.open_limit:
                self._drop(samples, RolloutPlace.LEASED, Reason.BUFFER_FULL)
                continue
            self._buffer.put(group)
            self._move(samples, RolloutPlace.LEASED, RolloutPlace.FRESH)
            self.open_groups += 1

    def note_version(self) -> None:
        """Note that a version was published: lost weights are restored with it."""
        self._is_restoring = False

    def consume(
        self,
        lease: Lease,
        now: datetime,
        *,
        step: int,
        wait_s: float,
        train_s: float,
        checkpoint_id: str = "",
    ) -> dict[str, float]:
        """Count the groups of a batch as trained; return the batch's metrics."""
        samples = lease.samples + lease.replayed_samples
        self.step = step if step > self.step else self.step + 1
        self.consumed_count += 1
        self.lineage.add(lease, self.step, checkpoint_id=checkpoint_id)
        # A version more would come of weights that are restored.
        oldest = self.versions.newest_version + 1 - self.settings.max_staleness
        self.lineage.release(oldest)
        self.open_groups -= len(lease.groups)
        self.books.move(RolloutPlace.LEASED, RolloutPlace.TRAINED, len(lease.samples))
        self.books.replayed += len(lease.replayed_samples)
        self.replay.use(lease.groups, lease.replayed)
        for row in lease.rows:
            row.use_count += 1
        for sample in samples:
            sample.place(
                self.policy_id,
                RolloutPlace.TRAINED,
                batch_id=lease.batch_id,
                step=self.step,
                staleness=lease.train_version - sample.min_version,
            )
        tokens = int(lease.metrics["batch/sampled_tokens"])
        ages = Counter(lease.train_version - sample.min_version for sample in samples)
        self.window.add(
            Consumed(
                time=now,
                wait_s=wait_s,
                train_s=train_s,
                token_count=tokens,
                staleness_counts=ages,
            )
        )
        return {
            **lease.metrics,
            **drop_metrics(self.books.drops),
            **time_metrics(tokens, wait_s=wait_s, train_s=train_s),
            **self.completion.metrics(),
            **self._guarding.metrics(),
            **self.replay.metrics(),
        }

    def retire(self, cause: EndCause, now: datetime) -> None:
        """End the data: what is in the buffer is dropped."""
        groups = self._buffer.clear()
        self._drop([s for g in groups for s in g.samples], RolloutPlace.FRESH, Reason.RUN_ENDED)
        self.open_groups -= len(groups)
        self.replay.clear()
        self.end, self.end_time = cause, now

    def _evict(self) -> None:
        """Drop what the buffer has no room for."""
        groups = self._buffer.evict()
        samples = [sample for group in groups for sample in group.samples]
        self._drop(samples, RolloutPlace.FRESH, Reason.BUFFER_FULL)
        self.open_groups -= len(groups)

    def _version_after(self, leased_batch_count: int, *, batches_ahead: int = 0) -> int:
        newest = self.versions.newest
        if newest is None:
            return batches_ahead // (self.settings.steps_per_version or 1) or -1
        is_restoring = self._is_restoring
        return admission.train_version(
            newest=newest.version + is_restoring,
            newest_step=self.step if is_restoring else newest.step,
            step=self.step,
            leased_batch_count=leased_batch_count,
            batches_ahead=batches_ahead,
            steps_per_version=self.settings.steps_per_version,
            is_asked=self.is_asked,
        )

    def _move(
        self,
        samples: Sequence[Sample],
        source: RolloutPlace,
        target: RolloutPlace,
        *,
        batch_id: BatchId | None = None,
    ) -> None:
        self.books.move(source, target, len(samples))
        for sample in samples:
            sample.place(self.policy_id, target, batch_id=batch_id)

    def _drop(
        self, samples: Iterable[Sample], source: RolloutPlace, reason: Reason, *, by: str = ""
    ) -> None:
        for sample in samples:
            self.books.drop(source, reason, by=by)
            sample.entry.placements[self.policy_id] = self._dropped(reason, by)

    def _dropped(self, reason: Reason, by: str) -> RolloutPlacement:
        return RolloutPlacement(
            policy_id=self.policy_id, place=RolloutPlace.DROPPED, reason=reason, filter=by
        )


def _head(group: TrainGroup) -> BatchGroup:
    return BatchGroup(
        group_id=group.group_id,
        prompt_id=group.prompt.prompt_id,
        data_set=group.prompt.data_set,
        epoch=group.prompt.epoch,
        sample_count=group.size,
    )
