"""Batch events: a trainer listens, and settles what it got."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from astraflow.core.batches import BatchOutcome
from astraflow.core.ids import BatchId, MemberId


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStreamOpened:
    """A rank of a trainer opens its stream, perhaps again. Answer: None.

    What the rank has to see follows as effects: batches that are not settled, whole and in
    order, the end of the data, a directive.

    Attributes:
        member_id: The trainer.
        rank: 0 .. world_size - 1.
        world_size: Ranks that share every batch.
        max_outstanding: Batches unsettled at once.
        max_tokens: Per part; 0: no limit but the message's.

    Raises:
        AstraflowError: SESSION_ENDED; REQUEST_CONFLICT when ranks differ in world_size;
            INVALID_FIELD.
    """

    member_id: MemberId
    rank: int = 0
    world_size: int = 1
    max_outstanding: int = 1
    max_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAcked:
    """A rank of a trainer, or all at once, settles a batch. Answer: bool, whether it is settled.

    Attributes:
        member_id: The trainer.
        batch_id: Which.
        outcome: What became of it.
        rank: None: for all ranks.
        step: Optimizer steps done, this batch included; 0: one more than before.
        checkpoint_id: Written after this batch; empty: none.
        wait_s: From the previous ack to the header.
        train_s: From the header to this ack.
        metrics: Numbers for the log.

    Raises:
        AstraflowError: SESSION_ENDED, BATCH_UNKNOWN, LEASE_LOST, REQUEST_CONFLICT.
    """

    member_id: MemberId
    batch_id: BatchId
    outcome: BatchOutcome
    rank: int | None = None
    step: int = 0
    checkpoint_id: str = ""
    wait_s: float = 0.0
    train_s: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


BatchEvent = BatchStreamOpened | BatchAcked
