"""Batching: whole groups go to trainers, and come back settled or not."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from astraflow.core.batches import AckBatch, BatchOutcome, EndCause, EndOfData, StreamBatches
from astraflow.core.effects import (
    Effects,
    RecordBatch,
    SendBatch,
    SendEndOfData,
    SendPublishOrder,
)
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import BatchId, IdGenerator, PolicyId
from astraflow.core.lifecycle import RunLifecycle
from astraflow.core.policy.leases import Lease
from astraflow.core.policy.state import PolicyState
from astraflow.core.pool.live_members import LiveTrainer
from astraflow.core.pool.sessions import Sessions
from astraflow.core.work.pacing import PolicyPacing
from astraflow.core.work.prompt_queue import PromptQueue
from astraflow.core.work.saving import Saving
from astraflow.core.work.training import Training


@dataclass(slots=True, kw_only=True, eq=False)
class Batching:
    """Leases batches to trainers and settles them."""

    policies: Mapping[PolicyId, PolicyState]
    sessions: Sessions
    prompts: PromptQueue
    training: Training
    saving: Saving
    pacing: PolicyPacing
    ids: IdGenerator
    lifecycle: RunLifecycle
    effects: Effects

    def open_stream(self, member: LiveTrainer, event: StreamBatches) -> None:
        """Let a rank listen, and send it again what it has not settled."""
        policy = self.policies[member.policy_id]
        if policy.settings.steps_per_version is None:
            # A version that is asked for comes between two batches: none is leased before it.
            event = replace(event, max_outstanding=1)
        policy.lease_table.open_stream(event)
        for lease in policy.lease_table.leases.values():
            if event.rank not in lease.acks:
                self._deliver(member, policy, lease, event.rank)
        if event.rank:
            return
        self.saving.order(policy)
        if policy.progress.is_ordered:
            self.effects.do(SendPublishOrder(member_id=member.member_id))

    def ack(self, member: LiveTrainer, event: AckBatch, now: datetime) -> bool:
        """Settle a batch once every rank agrees; return whether it is settled.

        The ack of the newest batch may come again to name a checkpoint that was written since.
        """
        policy = self.policies[member.policy_id]
        settled = policy.lease_table.outcomes.get(event.batch_id)
        if settled is not None:
            if event.outcome is not settled:
                raise AstraflowError(
                    Reason.REQUEST_CONFLICT,
                    f"batch {event.batch_id} is settled as {settled}, not {event.outcome}",
                )
            if policy.lineage.newest == event.batch_id:
                self._save(policy, event.checkpoint_id)
            return True
        lease = policy.lease_table.find(event.batch_id)
        policy.lease_table.check(lease, event.rank, event.outcome)
        if event.batch_id not in policy.lease_table.leases:
            # A late ack counts while nobody else holds a row.
            if event.outcome is not BatchOutcome.CONSUMED:
                return True
            if not policy.reclaim(lease):
                raise AstraflowError(
                    Reason.LEASE_LOST,
                    f"batch {lease.batch_id} went back when the session ended, and its rows are "
                    "elsewhere now; drop it and take the next one",
                )
        if not policy.lease_table.ack(lease, event.rank, event.outcome):
            return False
        self._close(policy, lease, event, now)
        return True

    def return_all(self, policy: PolicyState, *, but: frozenset[BatchId] = frozenset()) -> None:
        """End the leases of a trainer that is gone, but for those that it still works on."""
        for lease in list(policy.lease_table.leases.values()):
            if lease.batch_id not in but:
                policy.lease_table.lose(lease)
                policy.put_back(lease)

    def regain(self, policy: PolicyState, batch_ids: frozenset[BatchId]) -> None:
        """Lease again what a trainer still works on whose session had ended."""
        for batch_id in sorted(batch_ids):
            lease = policy.lease_table.lost.get(batch_id)
            if lease is not None:
                policy.reclaim(lease)

    def advance(self, now: datetime) -> None:
        """Lease what is ready to who has room."""
        if self.lifecycle.is_final:
            return
        for policy in self.policies.values():
            while policy.lease_table.has_capacity and policy.end is None:
                if self.pacing.blocker_of(policy) is not None:
                    break
                count = self._ready_count(policy)
                if not count:
                    break
                if not policy.samples.refuse(count):
                    self._lease(policy, count, now)

    def _is_dry(self, policy: PolicyState) -> bool:
        """Whether no group will become whole any more that is not whole now."""
        samples, leased_count = policy.samples, policy.lease_table.leased_groups
        return self.training.is_through and samples.open_count == len(samples.buffer) + leased_count

    def end_data(self, policy: PolicyState, member: LiveTrainer, cause: EndCause) -> None:
        """Tell every rank that listens, once, that no batch follows."""
        end = EndOfData(cause=cause, batch_count=policy.progress.consumed_count)
        for rank in policy.lease_table.end_streams():
            self.effects.do(SendEndOfData(member_id=member.member_id, rank=rank, end_of_data=end))

    def _ready_count(self, policy: PolicyState) -> int:
        """Return how many groups the next batch would have now; 0: it has to wait."""
        left = policy.progress.steps_left
        if left is not None and len(policy.lease_table.leases) >= left:
            return 0
        wanted = policy.samples.fresh_per_batch
        if len(policy.samples.buffer) < wanted and not self._is_dry(policy):
            return 0
        policy.samples.prune()
        self.prompts.lose(policy.samples.take_lost())
        count = len(policy.samples.buffer)
        if count >= wanted:
            return wanted
        return count if self._is_dry(policy) else 0

    def _lease(self, policy: PolicyState, count: int, now: datetime) -> None:
        # Whoever opened its streams is there: they are closed with its session.
        member = self.sessions.trainers[policy.policy_id]
        batch_id = BatchId(self.ids.next("batch"))
        lease = policy.samples.lease(batch_id, count)
        policy.window.begin(now)
        for rank in sorted(policy.lease_table.streams):
            self._deliver(member, policy, lease, rank)

    def _deliver(self, member: LiveTrainer, policy: PolicyState, lease: Lease, rank: int) -> None:
        stream = policy.lease_table.streams[rank]
        header, parts = lease.deliver(
            rank, world_size=policy.lease_table.world_size, max_tokens=stream.max_tokens
        )
        self.effects.do(
            SendBatch(member_id=member.member_id, rank=rank, header=header, parts=parts)
        )

    def _close(self, policy: PolicyState, lease: Lease, event: AckBatch, now: datetime) -> None:
        policy.lease_table.complete(lease, event.outcome)
        match event.outcome:
            case BatchOutcome.CONSUMED:
                metrics = {**self.prompts.metrics(), **event.metrics}
                consumed = policy.consume(lease, event, now, metrics=metrics)
                self._save(policy, event.checkpoint_id)
                self.effects.do(
                    RecordBatch(
                        policy_id=policy.policy_id,
                        batch_id=lease.batch_id,
                        step=policy.progress.step,
                        version=lease.version,
                        metrics=policy.metrics,
                        staleness_counts=consumed.staleness_counts,
                        trained_rows=lease.trained_rows,
                    )
                )
            case BatchOutcome.RETURNED:
                policy.samples.drop_lost(lease, frozenset(event.lost_rollout_ids))
                policy.put_back(lease)
            case BatchOutcome.DISCARDED:
                policy.samples.discard(lease)

    def _save(self, policy: PolicyState, checkpoint_id: str) -> None:
        policy.lineage.save(checkpoint_id)
        self.saving.note(policy, checkpoint_id)
