"""One policy: its books, its buffer, its versions, its batches, and how samples move through."""

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime

from astraflow.core import admission
from astraflow.core.advantages import stamp
from astraflow.core.batch_metrics import batch_metrics
from astraflow.core.batches import BatchGroup, EndCause
from astraflow.core.books import Books
from astraflow.core.buffer import FreshBuffer
from astraflow.core.errors import Reason
from astraflow.core.groups import TrainGroup
from astraflow.core.ids import BatchId
from astraflow.core.leases import Desk, Lease
from astraflow.core.members import ModelIdentity
from astraflow.core.records import Entry
from astraflow.core.samples import FreshGroup, Sample, sample_of
from astraflow.core.settings import PolicySettings
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
        open_groups: Groups with any sample that is in flight, waiting, fresh or leased.
        end: Why its data ended; None: it goes on.
        end_time: When.
        ended_ranks: Ranks that were told so.
        gone_time: When its last trainer was last heard of; None: it has one, or never had.
        metrics: Of the last batch that was trained on.
    """

    def __init__(
        self, settings: PolicySettings, *, min_group_size: int, kept_versions: int
    ) -> None:
        self.settings = settings
        self.policy_id = settings.policy_id
        self.identity = ModelIdentity()
        self.books = Books(settings.policy_id)
        self.versions = VersionLedger(settings.policy_id, kept_count=kept_versions)
        self.desk = Desk(settings.policy_id)
        self.window = Window()
        self.step = 0
        self.consumed_count = 0
        self.open_groups = 0
        self.end: EndCause | None = None
        self.end_time: datetime | None = None
        self.ended_ranks: set[int] = set()
        self.gone_time: datetime | None = None
        self._buffer = FreshBuffer(max_staleness=settings.max_staleness)
        self._min_group_size = min_group_size
        self._arrivals = 0
        self.metrics: Mapping[str, float] = {}

    @property
    def train_version(self) -> int:
        """Version that the next batch trains on; before the first publication 0."""
        return max(0, self._version_after(len(self.desk.leases)))

    @property
    def made_version(self) -> int:
        """Version that the acknowledged steps make; -1: not even the first one."""
        return self._version_after(0)

    @property
    def fresh_groups(self) -> int:
        """Whole groups in the buffer."""
        return len(self._buffer)

    @property
    def open_limit(self) -> int:
        """Groups that may be open."""
        return admission.open_limit(
            groups_per_batch=self.settings.groups_per_batch,
            max_staleness=self.settings.max_staleness,
            steps_left=self.steps_left,
        )

    @property
    def has_slot(self) -> bool:
        """Whether another group may be opened."""
        return self.open_groups < self.open_limit

    @property
    def is_starving(self) -> bool:
        """Whether what is open makes no batch beside those in the trainer's hands."""
        ahead = self.open_groups - self.desk.leased_groups
        return ahead < self.settings.groups_per_batch

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
        return admission.min_version(
            train_version=self.train_version,
            groups_ahead=max(0, ahead),
            groups_per_batch=self.settings.groups_per_batch,
            max_staleness=self.settings.max_staleness,
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

    def give_up(self, reason: Reason) -> None:
        """Drop a sample that no rollout will come of."""
        self.books.drop(RolloutPlace.IN_FLIGHT, reason)

    def complete(self, group: TrainGroup) -> None:
        """Move a whole group to the buffer, or drop it."""
        samples = group.samples.pop(self.policy_id, {})
        kept = [sample for _, sample in sorted(samples.items()) if sample.is_rewarded]
        for sample in samples.values():
            if not sample.is_rewarded:
                failure = sample.entry.rollout.failure
                reason = failure.reason if failure else Reason.FILTERED
                self._drop(
                    [sample], RolloutPlace.WAITING, reason, by="" if failure else "no_reward"
                )
        if len(kept) < self._min_group_size:
            self._drop(kept, RolloutPlace.WAITING, Reason.GROUP_INCOMPLETE)
            self.open_groups -= 1
            return
        rows = [row for sample in kept for row in sample.rows]
        stamp(rows, scale_by_std=self.settings.scale_by_std)
        self._arrivals += 1
        self._buffer.put(
            FreshGroup(
                head=_head(group),
                samples=tuple(kept),
                number=group.number,
                arrival=self._arrivals,
            )
        )
        self._move(kept, RolloutPlace.WAITING, RolloutPlace.FRESH)

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

    def lease(self, batch_id: BatchId, count: int, now: datetime) -> Lease:
        """Draw a batch of so many groups, at least one; `prune` comes before."""
        train_version = self.train_version
        # In the order of their issue, so that it does not matter which one was whole first.
        groups = tuple(sorted(self._buffer.take(count), key=lambda group: group.number))
        metrics = batch_metrics(groups, train_version=train_version) | {
            "buffer/size": float(self._buffer.sample_count),
            "buffer/open_groups": float(self.open_groups),
        }
        lease = Lease(
            batch_id=batch_id,
            policy_id=self.policy_id,
            version=self.versions.newest_version,
            train_version=train_version,
            groups=groups,
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

    def discard(self, lease: Lease) -> None:
        """Drop the groups of a batch."""
        self._drop(lease.samples, RolloutPlace.LEASED, Reason.BATCH_DISCARDED)
        self.open_groups -= len(lease.groups)

    def consume(
        self, lease: Lease, now: datetime, *, step: int, wait_s: float, train_s: float
    ) -> dict[str, float]:
        """Count the groups of a batch as trained; return the batch's metrics."""
        samples = lease.samples
        self.step = step if step > self.step else self.step + 1
        self.consumed_count += 1
        self.open_groups -= len(lease.groups)
        self._move(samples, RolloutPlace.LEASED, RolloutPlace.TRAINED, batch_id=lease.batch_id)
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
        return dict(lease.metrics) | self._time_metrics(tokens, wait_s, train_s)

    def retire(self, cause: EndCause, now: datetime) -> None:
        """End the data: what is in the buffer is dropped."""
        groups = self._buffer.clear()
        self._drop([s for g in groups for s in g.samples], RolloutPlace.FRESH, Reason.RUN_ENDED)
        self.open_groups -= len(groups)
        self.end, self.end_time = cause, now

    def _version_after(self, leased_batch_count: int) -> int:
        newest = self.versions.newest
        if newest is None:
            return -1
        return admission.train_version(
            newest=newest.version,
            newest_step=newest.step,
            step=self.step,
            leased_batch_count=leased_batch_count,
        )

    def _time_metrics(self, tokens: int, wait_s: float, train_s: float) -> dict[str, float]:
        seconds = wait_s + train_s
        drops = {f"buffer/dropped/{d.reason.lower()}": float(d.count) for d in self.books.drops}
        return drops | {
            "time/wait_batch_frac": wait_s / seconds if seconds > 0 else 0.0,
            "time/wait_s": wait_s,
            "time/train_s": train_s,
            "perf/tokens_per_s": tokens / seconds if seconds > 0 else 0.0,
        }

    def _move(
        self,
        samples: list[Sample],
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
