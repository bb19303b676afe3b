"""Lineage: which batches the weights of a policy were trained on, in order.

The law: within one lineage a rollout is in at most one trained batch. Weights that come back from
a checkpoint begin another lineage: what was trained on after it counts as not trained.

Example:
    Batches 1 to 7 are trained on, checkpoint `step_000004` was acknowledged with batch 4. A trainer
    that comes back with it undoes batches 7, 6 and 5.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from astraflow.core.batches import IssuedPrompt
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import BatchId, PolicyId
from astraflow.core.policy.leases import Lease

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
    def newest(self) -> BatchId | None:
        """The last batch; None: there is none."""
        return self._batches[-1].batch_id if self._batches else None

    def add(self, lease: Lease, step: int) -> None:
        self._batches.append(
            TrainedBatch(
                batch_id=lease.batch_id,
                step=step,
                sample_count=len(lease.samples),
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
