"""Leases: the batches in the hands of a trainer, the streams of its ranks, and what was trained on.

A lease belongs to the trainer's session. It ends by an ack, or with the session: then its
groups go back to the buffer, and an ack that comes later counts only while they are there.

Lineage says which batches the weights of a policy were trained on, in order. The
law: within one lineage a rollout is in at most one trained batch. Weights that come back from a
checkpoint begin another lineage: what was trained on after it counts as not trained.

Example:
    Batches 1 to 7 are trained on, checkpoint `step_000004` was acknowledged with batch 4. A trainer
    that comes back with it undoes batches 7, 6 and 5.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice

from astraflow.core.batches import (
    BatchHeader,
    BatchOutcome,
    IssuedPrompt,
    StreamBatches,
    TrainedRow,
)
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import BatchId, PolicyId
from astraflow.core.packing import Share, share_out
from astraflow.core.policy.metrics import ConsumedBatch
from astraflow.core.samples import FreshGroup, Row, Sample

# Outcomes kept so that a repeated ack is answered as the first one.
_KEPT_OUTCOMES = 1024
# Ended leases of which a late ack may still count.
_KEPT_LOST = 64


@dataclass(slots=True, kw_only=True, eq=False)
class Lease:
    """One batch in the hands of a trainer.

    Attributes:
        version: Newest version when it was drawn.
        train_version: Version that its rows are trained on, as `PolicyProgress.train_version`;
            staleness counts from it.
        groups: Fresh ones, in the order of their issue.
        replayed: Groups that were trained on before; in the books they stay trained.
        replayed_weights: Factor on the loss of each of them.
        acks: What ranks have said so far.
        deliveries: How often each rank was sent it.
    """

    batch_id: BatchId
    policy_id: PolicyId
    version: int
    train_version: int
    groups: tuple[FreshGroup, ...]
    replayed: tuple[FreshGroup, ...] = ()
    replayed_weights: tuple[float, ...] = ()
    metrics: Mapping[str, float]
    acks: dict[int, BatchOutcome] = field(default_factory=dict[int, BatchOutcome])
    deliveries: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def samples(self) -> list[Sample]:
        return [sample for group in self.groups for sample in group.samples]

    @property
    def replayed_samples(self) -> list[Sample]:
        """All samples in it that were trained on before."""
        return [sample for group in self.replayed for sample in group.samples]

    @property
    def min_version(self) -> int:
        return min(group.min_version for group in (*self.groups, *self.replayed))

    @property
    def rows(self) -> list[Row]:
        """All rows of it, in the order that shares and parts keep."""
        samples = self.samples + self.replayed_samples
        return [row for sample in samples for row in sample.rows]

    @property
    def trained_rows(self) -> tuple[TrainedRow, ...]:
        """What `rows` came from, in their order."""
        return tuple(
            [
                TrainedRow(
                    head=group.head,
                    rollout_id=row.rollout.rollout_id,
                    trajectory_index=row.rollout.trajectories.index(row.trajectory),
                    member_id=sample.entry.member_id,
                    reward=row.reward,
                    reward_parts=row.rollout.reward_parts,
                    advantage=row.advantage,
                    version_spans=row.trajectory.version_spans,
                )
                for group in (*self.groups, *self.replayed)
                for sample in group.samples
                for row in sample.rows
            ]
        )

    def deliver(self, rank: int, *, world_size: int, max_tokens: int) -> tuple[BatchHeader, Share]:
        """Return what one rank is sent; every rank, and every time, the same rows."""
        rows = self.rows
        lengths = [row.trajectory.token_count for row in rows]
        spans = (span for row in rows for span in row.trajectory.version_spans)
        others = {span.policy_id: None for span in spans if span.policy_id is not None}
        others.pop(self.policy_id, None)
        heads = tuple(group.head for group in (*self.groups, *self.replayed))
        weights: list[float] | None = None
        if any(weight != 1 for weight in self.replayed_weights):
            weights = [1.0 for group in self.groups for each in group.samples for _ in each.rows]
            for group, weight in zip(self.replayed, self.replayed_weights, strict=True):
                weights += [weight for sample in group.samples for _ in sample.rows]
        chosen = share_out(lengths, world_size)[rank]
        parts = Share(
            self.batch_id,
            [rows[index] for index in chosen],
            loss_weights=weights and [weights[index] for index in chosen],
            max_tokens=max_tokens,
            group_indexes={head.group_id: i for i, head in enumerate(heads)},
        )
        self.deliveries[rank] = self.deliveries.get(rank, 0) + 1
        header = BatchHeader(
            batch_id=self.batch_id,
            policy_id=self.policy_id,
            version=self.version,
            rank=rank,
            world_size=world_size,
            part_count=len(parts),
            row_count=len(rows),
            token_count=sum(lengths),
            loss_token_count=sum(
                span.length
                for row in rows
                for span in row.trajectory.version_spans
                if not row.is_masked and span.policy_id in (None, self.policy_id)
            ),
            groups=heads,
            policy_ids=(self.policy_id, *others),
            delivery_count=self.deliveries[rank],
            metrics=self.metrics,
        )
        return header, parts

    def consumed(self, now: datetime, *, wait_s: float, train_s: float) -> ConsumedBatch:
        """Return what the window keeps of it once it was trained on."""
        samples = self.samples + self.replayed_samples
        return ConsumedBatch(
            time=now,
            wait_s=wait_s,
            train_s=train_s,
            token_count=int(self.metrics["batch/sampled_tokens"]),
            staleness_counts=Counter(self.train_version - sample.min_version for sample in samples),
        )

    def keep_only(self, *, without: Sequence[Sample], without_replayed: Set[int]) -> int:
        """Take samples out, and replayed groups by their arrival.

        Returns:
            How many fresh groups nothing is left of.
        """
        for group in self.groups:
            group.samples = tuple(each for each in group.samples if each not in without)
        left = tuple(group for group in self.groups if group.samples)
        emptied_count = len(self.groups) - len(left)
        self.groups = left
        self.replayed = tuple(
            each for each in self.replayed if each.arrival not in without_replayed
        )
        return emptied_count


class LeaseTable:
    """Where the trainer of one policy gets its batches.

    Attributes:
        world_size: Ranks that share every batch; 0: no stream was ever opened.
        leases: Unsettled batches, oldest first.
        lost: Batches whose session ended; a late ack may still count.
        outcomes: What settled batches came to, the last ones.
    """

    def __init__(self, policy_id: PolicyId) -> None:
        self._policy_id = policy_id
        self.world_size = 0
        self.streams: dict[int, StreamBatches] = {}
        self.leases: dict[BatchId, Lease] = {}
        self.lost: dict[BatchId, Lease] = {}
        self.outcomes: dict[BatchId, BatchOutcome] = {}
        self._ended_ranks: set[int] = set()

    @property
    def has_capacity(self) -> bool:
        """Whether every rank listens and may hold one more batch."""
        if not self.world_size or len(self.streams) < self.world_size:
            return False
        bound = min(stream.max_outstanding for stream in self.streams.values())
        return len(self.leases) < bound

    @property
    def leased_groups(self) -> int:
        return sum(len(lease.groups) for lease in self.leases.values())

    def open_stream(self, stream: StreamBatches) -> None:
        """Let a rank listen, perhaps again."""
        rank, world_size = stream.rank, stream.world_size
        if not 0 <= rank < world_size or stream.max_outstanding < 1 or stream.max_tokens < 0:
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"rank {rank} of {world_size} with max_outstanding {stream.max_outstanding} and "
                f"max_tokens {stream.max_tokens} makes no stream",
            )
        if world_size != self.world_size and set(self.streams) - {rank}:
            raise AstraflowError(
                Reason.REQUEST_CONFLICT,
                f"rank {rank} says world_size {world_size}, the other ranks of "
                f"{self._policy_id} say {self.world_size}",
            )
        if world_size != self.world_size:
            for lease in self.leases.values():
                # They were for other shares of the batch.
                lease.acks.clear()
        self.world_size = world_size
        self.streams[rank] = stream
        self._ended_ranks.discard(rank)

    def end_streams(self) -> list[int]:
        """Return the ranks that listen and have yet to learn that no batch follows, each once."""
        ranks = sorted(set(self.streams) - self._ended_ranks)
        self._ended_ranks.update(ranks)
        return ranks

    def add(self, lease: Lease) -> None:
        """Lease a batch, be it one whose lease was lost."""
        self.leases[lease.batch_id] = lease
        self.lost.pop(lease.batch_id, None)

    def find(self, batch_id: BatchId) -> Lease:
        """Return an unsettled batch, or one whose lease was lost."""
        lease = self.leases.get(batch_id) or self.lost.get(batch_id)
        if lease is None:
            raise AstraflowError(
                Reason.BATCH_UNKNOWN, f"the trainer of {self._policy_id} has no batch {batch_id}"
            )
        return lease

    def check(self, lease: Lease, rank: int | None, outcome: BatchOutcome) -> None:
        """Refuse an ack that contradicts an earlier one."""
        if rank is not None and not 0 <= rank < max(1, self.world_size):
            raise AstraflowError(
                Reason.INVALID_FIELD, f"there is no rank {rank}", metadata={"field": "rank"}
            )
        if any(other is not outcome for other in lease.acks.values()):
            raise AstraflowError(
                Reason.REQUEST_CONFLICT,
                f"batch {lease.batch_id} was acknowledged as {next(iter(lease.acks.values()))}, "
                f"not {outcome}, by another rank",
            )

    def ack(self, lease: Lease, rank: int | None, outcome: BatchOutcome) -> bool:
        """Note an ack that passed `check`; return whether it settles the batch."""
        if rank is not None:
            lease.acks[rank] = outcome
        return rank is None or len(lease.acks) >= max(1, self.world_size)

    def complete(self, lease: Lease, outcome: BatchOutcome) -> None:
        self.leases.pop(lease.batch_id, None)
        self.lost.pop(lease.batch_id, None)
        self.outcomes[lease.batch_id] = outcome
        _bound(self.outcomes, _KEPT_OUTCOMES)

    def lose(self, lease: Lease) -> None:
        """End a lease without an ack; a late one may still count."""
        del self.leases[lease.batch_id]
        lease.acks.clear()
        self.lost[lease.batch_id] = lease
        _bound(self.lost, _KEPT_LOST)

    def close(self) -> None:
        """Forget the streams; what ranks say of a batch before they listen again counts."""
        self.streams.clear()


def _bound(entries: dict[BatchId, Lease] | dict[BatchId, BatchOutcome], count: int) -> None:
    while len(entries) > count:
        del entries[next(iter(entries))]


# Trained groups, the newest ones, whose prompts are drawn again when they are rolled back.
_KEPT_PROMPTS = 32768


@dataclass(slots=True, kw_only=True, eq=False)
class TrainedBatch:
    """One batch that counts as trained.

    Attributes:
        step: Optimizer steps with it.
        sample_count: Fresh samples in it.
        replayed_count: Samples in it that were trained on before.
        arrivals: Of its fresh groups.
        lease: What was in it; None: too old to be trained on again.
        prompts: Of its fresh groups; empty: of a batch that is long gone.
    """

    batch_id: BatchId
    step: int
    sample_count: int
    replayed_count: int
    arrivals: tuple[int, ...]
    lease: Lease | None
    prompts: tuple[IssuedPrompt, ...] = ()


class Lineage:
    """The batches behind the weights of one policy."""

    def __init__(self, policy_id: PolicyId) -> None:
        self._policy_id = policy_id
        self._batches: list[TrainedBatch] = []
        self._checkpoints: dict[str, int] = {}
        # Batches before this index hold no lease, and before the other one no prompts.
        self._emptied = self._forgotten = 0
        self._prompt_count = 0

    @property
    def leases(self) -> Iterator[Lease]:
        """What of the batches may be trained on again after a rollback."""
        kept = (batch.lease for batch in islice(self._batches, self._emptied, None))
        return (lease for lease in kept if lease is not None)

    @property
    def step(self) -> int:
        """Optimizer steps behind the newest batch; 0: there is none."""
        return self._batches[-1].step if self._batches else 0

    @property
    def newest(self) -> BatchId | None:
        """The last batch; None: there is none."""
        return self._batches[-1].batch_id if self._batches else None

    def add(self, lease: Lease, step: int) -> None:
        self._batches.append(
            TrainedBatch(
                batch_id=lease.batch_id,
                step=step,
                sample_count=sum([len(group.samples) for group in lease.groups]),
                replayed_count=len(lease.replayed_samples),
                arrivals=tuple(group.arrival for group in lease.groups),
                lease=lease,
                prompts=tuple(IssuedPrompt.of(group.head, group.number) for group in lease.groups),
            )
        )
        self._prompt_count += len(lease.groups)
        while self._prompt_count > _KEPT_PROMPTS:
            oldest = self._batches[self._forgotten]
            self._prompt_count -= len(oldest.prompts)
            oldest.prompts = ()
            self._forgotten += 1

    def knows(self, checkpoint_id: str) -> bool:
        """Whether the weights that count come of a checkpoint, or are it."""
        return checkpoint_id in self._checkpoints

    def save(self, checkpoint_id: str) -> None:
        """Note a checkpoint of the weights after the newest batch; empty: there is none."""
        if checkpoint_id:
            self._checkpoints[checkpoint_id] = len(self._batches)

    def release(self, oldest_version: int) -> None:
        """Let go of the tokens of batches that have no sample as new as a version."""
        while self._emptied < len(self._batches):
            lease = self._batches[self._emptied].lease
            if lease is not None and any(s.min_version >= oldest_version for s in lease.samples):
                return
            self._batches[self._emptied].lease = None
            self._emptied += 1

    def undone_count(self, checkpoint_id: str, step: int) -> int:
        """Return how many batches weights do not know of.

        Args:
            checkpoint_id: Where they come from; empty: they say only their steps.
            step: Optimizer steps behind them.
        """
        if not self._batches:
            return 0
        kept = self._saved(checkpoint_id, step) if checkpoint_id else self._kept(step)
        if kept is None:
            newest = self._batches[-1].step
            known = ", ".join(list(self._checkpoints)[-3:]) or "none"
            raise AstraflowError(
                Reason.CHECKPOINT_UNKNOWN,
                f"{self._policy_id} has {newest} acknowledged steps and no checkpoint "
                f"'{checkpoint_id}' of step {step} among them; start from one that the run "
                f"knows, the last ones are: {known}",
            )
        return len(self._batches) - kept

    def cut(self, count: int) -> list[TrainedBatch]:
        """Take out the last batches, newest first, and the checkpoints after them."""
        left = len(self._batches) - count
        undone = self._batches[left:][::-1]
        del self._batches[left:]
        self._checkpoints = {n: kept for n, kept in self._checkpoints.items() if kept <= left}
        self._emptied, self._forgotten = min(self._emptied, left), min(self._forgotten, left)
        self._prompt_count -= sum(len(batch.prompts) for batch in undone)
        return undone

    def last_use(self, arrival: int) -> TrainedBatch | None:
        """Return the newest batch that a group was trained on in; None: none that is known."""
        for batch in reversed(self._batches):
            again = () if batch.lease is None else batch.lease.replayed
            if arrival in batch.arrivals or any(group.arrival == arrival for group in again):
                return batch
        return None

    def _saved(self, checkpoint_id: str, step: int) -> int | None:
        """Return how many batches are behind a checkpoint; None: there is none of these steps."""
        kept = self._checkpoints.get(checkpoint_id)
        is_other = kept and step and self._batches[kept - 1].step != step
        return None if is_other else kept

    def _kept(self, step: int) -> int | None:
        """Return how many batches are behind so many steps; None: no batch ended there."""
        if step == 0:
            return 0
        for index in range(len(self._batches), 0, -1):
            if self._batches[index - 1].step <= step:
                return index if self._batches[index - 1].step == step else None
        return None
