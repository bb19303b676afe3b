"""Refusals: what is said to a rollout that is of no use."""

from collections.abc import Iterable
from dataclasses import dataclass

from astraflow.core.errors import Reason
from astraflow.core.events import RolloutArrived, RolloutRepeated
from astraflow.core.groups import Assignment, EvalGroup, SampleGroup, TrainGroup
from astraflow.core.ids import MemberId, PolicyId, RolloutId
from astraflow.core.rollouts import Disposition, ItemAck, Outcome, Rollout
from astraflow.core.state import State
from astraflow.core.tasks import TaskPurpose

# No rollout of these is kept: another attempt is made.
UNDONE = frozenset({Outcome.INFRA_ERROR, Outcome.CANCELLED, Outcome.RETURNED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """What would be said to a rollout that changes nothing but a count.

    Attributes:
        ack: The answer.
        event: What to apply in place of the rollout; None: nothing at all changes.
    """

    ack: ItemAck
    event: RolloutRepeated | None = None


def refusal_of(state: State, event: RolloutArrived) -> Refusal | None:
    """Return what a rollout comes to that is of no use; None: it has to be looked at whole."""
    rollout, member_id = event.rollout, event.member_id
    assignment = state.assignments.get(rollout.task_id)
    group = state.groups.get(rollout.group_id)
    if assignment is None or assignment.member_id != member_id:
        if is_late(rollout, member_id, group):
            return None
        return _refusal(state, event, unknown_ack(state, rollout, group), group)
    fault = fault_of(state, rollout, assignment)
    if fault is not None:
        return Refusal(ack=fault)
    index = rollout.sample_index
    if index in assignment.open_indexes or not (group is None or group.slots[index].is_done):
        return None
    return _refusal(state, event, closed_ack(rollout, assignment), group)


def is_late(rollout: Rollout, member_id: MemberId, group: SampleGroup | None) -> bool:
    """Whether it is of a task that its sender held, unanswered, in an earlier session."""
    lost = None if group is None else group.lost.get(rollout.task_id)
    if lost is None or lost.member_id != member_id:
        return False
    return rollout.sample_index in lost.open_indexes and rollout.outcome not in UNDONE


def fault_of(state: State, rollout: Rollout, assignment: Assignment) -> ItemAck | None:
    """Refuse a rollout that contradicts its task; None: it does not."""
    task = assignment.task
    if rollout.group_id != task.group_id or rollout.sample_index not in task.sample_indexes:
        why = f"task {task.task_id} did not ask for this sample"
        return refuse(rollout.rollout_id, Reason.ROLLOUT_INVALID, why)
    for trajectory in rollout.trajectories:
        if trajectory.sampling.is_reshaped and task.purpose is TaskPurpose.TRAIN:
            knobs = ", ".join(trajectory.sampling.reshaped_by)
            why = f"{knobs} reshaped what was sampled, which trainers cannot score"
            return refuse(rollout.rollout_id, Reason.ROLLOUT_INVALID, why)
        for span in trajectory.version_spans:
            policy_id = span.policy_id or trajectory.policy_id
            bounds = task.versions.get(policy_id)
            if bounds is None or trajectory.policy_id not in task.versions:
                why = f"the workflow does not sample {policy_id}"
                return refuse(rollout.rollout_id, Reason.POLICY_UNKNOWN, why)
            if span.version > state.policies[policy_id].versions.newest_version:
                why = f"{policy_id} has no version {span.version}"
                return refuse(rollout.rollout_id, Reason.VERSION_UNKNOWN, why)
            if bounds.max is not None and span.version not in bounds:
                why = f"{policy_id} is pinned to {bounds.max}"
                return refuse(rollout.rollout_id, Reason.VERSION_NOT_SERVED, why)
    return None


def unknown_ack(state: State, rollout: Rollout, group: SampleGroup | None) -> ItemAck:
    """Answer for a task that the sender does not hold (any more)."""
    index, name = rollout.sample_index, rollout.group_id
    if not (state.ids.has_issued("group", name) or state.ids.has_issued("eval-group", name)):
        return refuse(rollout.rollout_id, Reason.TASK_UNKNOWN, "the run sent no such task")
    if group is None or (index < group.size and group.slots[index].is_done):
        return repeated_ack(rollout.rollout_id)
    return ItemAck(
        item_id=rollout.rollout_id,
        disposition=Disposition.DROPPED,
        reason=Reason.TASK_UNKNOWN,
        message=f"task {rollout.task_id} is not held; its samples are asked for elsewhere",
    )


def closed_ack(rollout: Rollout, assignment: Assignment) -> ItemAck:
    """Answer for a sample that is settled while its task is still open."""
    if not assignment.is_withdrawn:
        return repeated_ack(rollout.rollout_id)
    return ItemAck(
        item_id=rollout.rollout_id,
        disposition=Disposition.DROPPED,
        reason=Reason.TASK_CANCELLED,
        message="nobody waits for it any more",
    )


def repeated_ack(rollout_id: RolloutId) -> ItemAck:
    """Answer for a sample that is settled."""
    return ItemAck(
        item_id=rollout_id,
        disposition=Disposition.DUPLICATE,
        reason=Reason.DUPLICATE,
        message="this sample is settled",
    )


def refuse(item_id: str, reason: Reason, message: str) -> ItemAck:
    """Answer for an item that is not taken."""
    return ItemAck(
        item_id=item_id, disposition=Disposition.REJECTED, reason=reason, message=message
    )


def repeaters(state: State, rollout: Rollout, group: SampleGroup | None) -> tuple[PolicyId, ...]:
    """Return the policies in whose books a repetition counts."""
    if isinstance(group, EvalGroup):
        return ()
    policies: Iterable[PolicyId] = {each.policy_id for each in rollout.trajectories}
    if isinstance(group, TrainGroup):
        policies = group.policies
    return tuple(sorted(set(policies) & state.policies.keys()))


def _refusal(
    state: State, event: RolloutArrived, ack: ItemAck, group: SampleGroup | None
) -> Refusal:
    if ack.disposition is not Disposition.DUPLICATE:
        return Refusal(ack=ack)
    repetition = RolloutRepeated(
        member_id=event.member_id,
        rollout_id=event.rollout.rollout_id,
        policy_ids=repeaters(state, event.rollout, group),
    )
    return Refusal(ack=ack, event=repetition)
