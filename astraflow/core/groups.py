"""Groups: the samples of one prompt, each asked for until it is answered or given up."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from astraflow.core.batches import BatchGroup
from astraflow.core.errors import Failure, Reason
from astraflow.core.ids import EvalRunId, GroupId, MemberId, PolicyId, TaskId, WorkflowId
from astraflow.core.samples import Sample
from astraflow.core.tasks import Prompt, RolloutTask, TaskPurpose

# Another attempt would fail the same way.
_LASTING = frozenset(
    {
        Reason.CONTEXT_TOO_LONG,
        Reason.MESSAGE_TOO_LARGE,
        Reason.INVALID_FIELD,
        Reason.CODE_UNKNOWN,
        Reason.PROMPT_POISONED,
    }
)
# As many as DeadLetter shows.
_KEPT_FAILURES = 16


@dataclass(slots=True, kw_only=True, eq=False)
class SampleSlot:
    """One sample of a group until it is answered.

    Attributes:
        holder: The task that it is out with; None: it waits to be issued.
        issue_count: Tasks that it was part of.
        failure_count: Of these, those that failed and were neither returned nor lost.
        is_done: Answered or given up.
    """

    holder: TaskId | None = None
    issue_count: int = 0
    failure_count: int = 0
    is_done: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class SampleGroup:
    """What training and evaluation groups share: which samples are still to be answered.

    Attributes:
        loss_count: Members that were lost while they held some of it.
        lost: Tasks whose session ended; a late rollout of one still counts.
    """

    group_id: GroupId
    prompt: Prompt
    workflow_id: WorkflowId
    slots: list[SampleSlot]
    purpose: TaskPurpose
    failures: deque[Failure] = field(default_factory=lambda: deque[Failure](maxlen=_KEPT_FAILURES))
    open_count: int = 0
    is_queued: bool = False
    loss_count: int = 0
    lost: dict[TaskId, "Assignment"] = field(default_factory=dict[TaskId, "Assignment"])

    def __post_init__(self) -> None:
        self.open_count = len(self.slots)

    @property
    def size(self) -> int:
        return len(self.slots)

    @property
    def unissued(self) -> list[int]:
        return [
            index
            for index, slot in enumerate(self.slots)
            if not slot.is_done and slot.holder is None
        ]

    @property
    def attempt(self) -> int:
        """Number of the next attempt of what is unissued."""
        return max((self.slots[index].issue_count for index in self.unissued), default=0)

    def hand_out(self, indexes: tuple[int, ...], task_id: TaskId) -> int:
        """Note that samples are out; return how many of them were out before."""
        repeats = 0
        for index in indexes:
            slot = self.slots[index]
            slot.holder = task_id
            repeats += slot.issue_count > 0
            slot.issue_count += 1
        return repeats

    def finish(self, index: int) -> None:
        slot = self.slots[index]
        slot.is_done, slot.holder = True, None
        self.open_count -= 1

    def enqueue(self) -> bool:
        """Note that it waits to be issued again; False: it did already."""
        was_queued, self.is_queued = self.is_queued, True
        return not was_queued

    def lose(self, assignment: "Assignment", *, is_lost: bool) -> None:
        """Note that the session of who held some of it ended."""
        self.lost[assignment.task_id] = assignment
        self.loss_count += is_lost

    def fail(self, index: int, failure: Failure, *, max_attempts: int, is_counted: bool) -> bool:
        """Note that an attempt failed; return whether the sample is to be given up."""
        slot = self.slots[index]
        slot.holder = None
        slot.failure_count += is_counted
        self.failures.append(failure.shortened())
        return failure.reason in _LASTING or slot.failure_count >= max_attempts


@dataclass(slots=True, kw_only=True, eq=False)
class TrainGroup(SampleGroup):
    """A group for training.

    Attributes:
        number: Rises by one per group; a batch holds its groups in this order.
        policies: That train on it; those whose data ended are taken out.
        samples: What was accepted for each policy, by sample index.
        has_reward: Whether any rollout was rewarded.
    """

    number: int
    policies: list[PolicyId]
    samples: dict[PolicyId, dict[int, Sample]] = field(
        default_factory=dict[PolicyId, dict[int, Sample]]
    )
    has_reward: bool = False

    def leave(self, policy_id: PolicyId) -> Mapping[int, Sample]:
        """Have a policy train on it no more; return what was kept for it."""
        self.policies.remove(policy_id)
        return self.samples.pop(policy_id, {})

    @property
    def head(self) -> BatchGroup:
        return BatchGroup(
            group_id=self.group_id,
            prompt_id=self.prompt.prompt_id,
            data_set=self.prompt.data_set,
            epoch=self.prompt.epoch,
            sample_count=len(self.slots),
        )


@dataclass(slots=True, kw_only=True, eq=False)
class EvalGroup(SampleGroup):
    """The repeats of one prompt of an evaluation.

    Attributes:
        sampling: Fields of SamplingParams that differ from the policies'.
        rewards: Of the scored rollouts.
    """

    eval_run_id: EvalRunId
    data_set_index: int
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    rewards: list[float] = field(default_factory=list[float])


@dataclass(slots=True, kw_only=True, eq=False)
class Assignment:
    """A task at a RaaS, until its result comes or the session ends.

    Attributes:
        open_indexes: Those without an answer; they count against the credit.
        is_withdrawn: Whether it was cancelled; its result is still due.
    """

    task: RolloutTask
    member_id: MemberId
    group: SampleGroup
    open_indexes: set[int]
    issue_time: datetime
    is_withdrawn: bool = False

    @property
    def task_id(self) -> TaskId:
        return self.task.task_id

    @property
    def is_eval(self) -> bool:
        return self.group.purpose is TaskPurpose.EVAL
