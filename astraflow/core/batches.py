"""Batches: rows of trajectories, packed end to end, shared out over the ranks of a trainer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

import numpy as np

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.frozen import fast_init
from astraflow.core.ids import (
    NOBODY,
    BatchId,
    GroupId,
    MemberId,
    PolicyId,
    PromptId,
    RolloutId,
    TrajectoryId,
)
from astraflow.core.rollouts import Column, Trajectory, VersionSpan, columns_fault


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchGroup:
    """One group of a batch.

    Attributes:
        sample_count: Rollouts asked for; fewer are in the batch when the group shrank.
        traceparent: W3C trace context.
    """

    group_id: GroupId
    prompt_id: PromptId
    data_set: str
    epoch: int = 0
    sample_count: int
    traceparent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedPrompt:
    """A prompt as a group was issued for it; `number` is that of the group."""

    number: int
    data_set: str
    epoch: int
    prompt_id: PromptId

    @classmethod
    def of(cls, head: BatchGroup, number: int) -> Self:
        return cls(
            number=number, data_set=head.data_set, epoch=head.epoch, prompt_id=head.prompt_id
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchHeader:
    """What opens a batch on the stream of one rank; see `rollout/v1/batch.proto`.

    Counts are of the whole batch, not of the rank's share. `loss_token_count` is the
    divisor of a token mean.
    """

    batch_id: BatchId
    policy_id: PolicyId
    version: int
    rank: int = 0
    world_size: int = 1
    part_count: int
    row_count: int
    token_count: int
    loss_token_count: int
    groups: tuple[BatchGroup, ...]
    policy_ids: tuple[PolicyId, ...]
    delivery_count: int = 1
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


@fast_init
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowSource:
    """What the columns of one row are made from.

    Attributes:
        trajectory: Of the row, with its arrays or the payload that they lie in.
        advantage: Of every token that is trained on.
        is_masked: Whether nothing of it is trained on, as of a truncated sample that counts for
            the baseline alone.
        loss_weight: Factor on the loss of all its tokens; None: its own columns alone say.
    """

    trajectory: Trajectory
    advantage: float
    is_masked: bool = False
    loss_weight: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchPart:
    """Some rows of a batch, never padded.

    Row i is the slice `[row_offsets[i], row_offsets[i + 1])` of every TOKEN column and
    element i of every ROW column.

    Attributes:
        index: 0 .. part_count - 1.
        row_offsets: i64[N + 1], first 0, last the number of tokens.
        trajectory_ids: One per row.
        rollout_ids: One per row.
        columns: By name; see `rollout/v1/column.proto`.
        sources: One per row where some columns are still to be made of these, as
            `packing.laid_out` does; else none.

    Raises:
        AstraflowError: INVALID_FIELD when offsets, ids or columns disagree in length.
    """

    batch_id: BatchId
    index: int
    row_offsets: np.ndarray
    trajectory_ids: tuple[TrajectoryId, ...]
    rollout_ids: tuple[RolloutId, ...]
    columns: Mapping[str, Column]
    sources: tuple[RowSource, ...] = ()

    def __post_init__(self) -> None:
        offsets, row_count = self.row_offsets, len(self.row_offsets) - 1
        fault = None
        if offsets.dtype != np.int64 or offsets.ndim != 1 or row_count < 0 or offsets[0] != 0:
            fault = "row_offsets must be i64 and begin with 0"
        elif (np.diff(offsets) < 1).any():
            fault = "row_offsets must rise"
        elif not len(self.trajectory_ids) == len(self.rollout_ids) == row_count:
            fault = "a row needs one trajectory_id and one rollout_id"
        elif self.sources and len(self.sources) != row_count:
            fault = "a row needs one source, where there are any"
        else:
            count = int(offsets[-1])
            fault = columns_fault(self.columns, row_count=row_count, token_count=count)
        if fault:
            raise AstraflowError(
                Reason.INVALID_FIELD, f"batch {self.batch_id} part {self.index}: {fault}"
            )

    @property
    def row_count(self) -> int:
        return len(self.row_offsets) - 1

    @property
    def token_count(self) -> int:
        return int(self.row_offsets[-1])

    def values(self, name: str) -> np.ndarray:
        """Return one column's array; KeyError when the part has none of this name."""
        return self.columns[name].values


@fast_init
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRow:
    """Where one row of a settled batch came from, and what it counted for.

    Attributes:
        trajectory_index: Among the trajectories of the rollout.
        member_id: Who made it.
        reward: Its own, else the rollout's; NaN: none.
        advantage: Of every token of it that was trained on.
        version_spans: Of its sampled tokens.
    """

    head: BatchGroup
    rollout_id: RolloutId
    trajectory_index: int
    member_id: MemberId
    reward: float
    reward_parts: Mapping[str, float]
    advantage: float
    version_spans: tuple[VersionSpan, ...]


class BatchOutcome(StrEnum):
    """What became of a batch."""

    CONSUMED = "consumed"
    RETURNED = "returned"
    DISCARDED = "discarded"


class EndCause(StrEnum):
    """Why the data ended."""

    SOURCE_EXHAUSTED = "source_exhausted"
    STEP_LIMIT = "step_limit"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOfData:
    """No batch will follow.

    Attributes:
        batch_count: Batches that this trainer consumed over the whole run.
    """

    cause: EndCause
    batch_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamBatches:
    """A rank of a trainer opens its stream, perhaps again. Answer: None.

    What the rank has to see follows as effects: batches that are not acknowledged, whole and in
    order, the end of the data, a directive.

    Attributes:
        member_id: The trainer; the hub knows it by the call's session.
        rank: 0 .. world_size - 1.
        world_size: Ranks that share every batch; equal on all of them.
        max_tokens: Tokens per part, at most; 0: no limit but the message's.
        max_outstanding: Batches without an ack at once; 1 is strict, 2 prefetches one.

    Raises:
        AstraflowError: SESSION_ENDED; REQUEST_CONFLICT when ranks differ in world_size;
            INVALID_FIELD.
    """

    member_id: MemberId = NOBODY
    rank: int = 0
    world_size: int = 1
    max_tokens: int = 0
    max_outstanding: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AckBatch:
    """A rank of a trainer, or all at once, settles a batch. Answer: bool, whether it is settled.

    Attributes:
        member_id: The trainer; the hub knows it by the call's session.
        rank: None: for all ranks.
        outcome: What became of it.
        step: Optimizer steps done, this batch included; 0: one more than before.
        checkpoint_id: Written after this batch; empty: none.
        wait_s: From the previous ack to the header of this batch; 0: not measured.
        train_s: From the header of this batch to this ack; 0: not measured.
        metrics: Numbers for the log.
        lost_rollout_ids: Of a batch that returns: what is dropped of it, for its payload is lost.

    Raises:
        AstraflowError: SESSION_ENDED, BATCH_UNKNOWN, LEASE_LOST, REQUEST_CONFLICT.
    """

    member_id: MemberId = NOBODY
    batch_id: BatchId
    rank: int | None = None
    outcome: BatchOutcome
    step: int = 0
    checkpoint_id: str = ""
    wait_s: float = 0.0
    train_s: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    lost_rollout_ids: tuple[RolloutId, ...] = ()
