"""Work events: what a RaaS takes on, and what comes of it."""

from dataclasses import dataclass

from astraflow.core.errors import Failure
from astraflow.core.ids import MemberId, PolicyId, RolloutId, TaskId
from astraflow.core.rollouts import Rollout, TaskResult


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditGiven:
    """A RaaS bounds its work from now on (TaskOpen, TaskCredit). Answer: None.

    Attributes:
        member_id: Who.
        max_outstanding: Samples without an accepted rollout in its unfinished tasks; 0 pauses.
        max_eval_outstanding: Of these, for evaluations; None: all.
        max_eval_extra: Samples of evaluations beyond `max_outstanding`.

    Raises:
        AstraflowError: SESSION_ENDED.
    """

    member_id: MemberId
    max_outstanding: int
    max_eval_outstanding: int | None = None
    max_eval_extra: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskNacked:
    """A RaaS gives a task back unstarted. Answer: None; one that it does not hold is ignored."""

    member_id: MemberId
    task_id: TaskId
    failure: Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutArrived:
    """A RaaS sends a rollout. Answer: ItemAck.

    Raises:
        AstraflowError: SESSION_ENDED.
    """

    member_id: MemberId
    rollout: Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRepeated:
    """A RaaS sends a rollout whose sample is settled. Answer: ItemAck.

    It stands for a RolloutArrived of which `Run.refusal` says so, and holds no tokens.

    Attributes:
        member_id: Who sent it.
        rollout_id: What is acknowledged.
        policy_ids: In whose books it counts.

    Raises:
        AstraflowError: SESSION_ENDED.
    """

    member_id: MemberId
    rollout_id: RolloutId
    policy_ids: tuple[PolicyId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFinished:
    """A RaaS closes a task. Answer: ItemAck.

    Raises:
        AstraflowError: SESSION_ENDED.
    """

    member_id: MemberId
    result: TaskResult


WorkEvent = CreditGiven | TaskNacked | RolloutArrived | RolloutRepeated | TaskFinished
