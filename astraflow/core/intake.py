"""Intake: what a RaaS sends back, and what becomes of work that comes back undone."""

from datetime import datetime

from astraflow.core.effects import RecordRollout
from astraflow.core.errors import Failure, Reason
from astraflow.core.evaluation import Evaluation
from astraflow.core.groups import Assignment, EvalGroup, Group, TrainGroup
from astraflow.core.ids import TaskId
from astraflow.core.live_members import RaasMember
from astraflow.core.outbound import Outbound
from astraflow.core.policies import Policy
from astraflow.core.reach import newest_in_reach, waits_in_vain
from astraflow.core.records import Entry
from astraflow.core.rollouts import Disposition, ItemAck, Outcome, Rollout, TaskResult
from astraflow.core.state import State
from astraflow.core.tasks import CancelReason
from astraflow.core.training import Training

# No rollout of these is kept: another attempt is made.
_UNDONE = frozenset({Outcome.INFRA_ERROR, Outcome.CANCELLED, Outcome.RETURNED})
# Handed back in good order: it does not count as a failed attempt.
_ORDERLY = frozenset({Reason.MEMBER_DRAINING, Reason.TASK_CANCELLED})


class Intake:
    """Takes rollouts, results and tasks given back."""

    def __init__(
        self, state: State, outbound: Outbound, *, training: Training, evaluation: Evaluation
    ) -> None:
        self._state = state
        self._outbound = outbound
        self._training = training
        self._evaluation = evaluation

    def rollout(self, member: RaasMember, rollout: Rollout, now: datetime) -> ItemAck:
        """Take a rollout, whole or not at all."""
        assignment = self._state.assignments.get(rollout.task_id)
        group = self._state.groups.get(rollout.group_id)
        if assignment is None or assignment.member_id != member.member_id:
            return self._from_before(member, rollout, group, now) or self._unknown(rollout, group)
        fault = self._fault(rollout, assignment)
        if fault is not None:
            return _refuse(rollout.rollout_id, *fault)
        index = rollout.sample_index
        member.answer(assignment, index)
        if group is None or group.slots[index].is_done:
            return self._late(rollout, assignment, group)
        if rollout.outcome in _UNDONE:
            failure = rollout.failure or Failure(reason=Reason.INTERNAL)
            is_counted = rollout.outcome is not Outcome.RETURNED
            self._fail(group, index, failure, now, is_counted=is_counted, by=assignment.task_id)
            return _accept(rollout.rollout_id)
        self._measure(member, rollout, (now - assignment.issue_time).total_seconds())
        self._keep(member, group, rollout, now)
        return _accept(rollout.rollout_id)

    def _from_before(
        self, member: RaasMember, rollout: Rollout, group: Group | None, now: datetime
    ) -> ItemAck | None:
        """Use a rollout of a task that was lost with an earlier session; None: it is no use.

        Whoever was asked for the sample since then is told not to bother.
        """
        lost = None if group is None else group.lost.get(rollout.task_id)
        if group is None or lost is None or lost.member_id != member.member_id:
            return None
        index = rollout.sample_index
        if index not in lost.open_indexes or rollout.outcome in _UNDONE:
            return None
        fault = self._fault(rollout, lost)
        if fault is not None:
            return _refuse(rollout.rollout_id, *fault)
        if group.slots[index].is_done:
            return None
        holder = self._state.assignments.get(group.slots[index].holder or TaskId(""))
        if holder is not None:
            self._outbound.withdraw_sample(holder, index, CancelReason.GROUP_DONE)
        self._keep(member, group, rollout, now)
        return _accept(rollout.rollout_id)

    def result(self, member: RaasMember, result: TaskResult, now: datetime) -> ItemAck:
        """Close a task; what it left unanswered is issued again."""
        assignment = member.assignments.get(result.task_id)
        if assignment is None:
            if self._state.mint.has_minted("task", result.task_id):
                return ItemAck(
                    item_id=result.task_id,
                    disposition=Disposition.DUPLICATE,
                    reason=Reason.DUPLICATE,
                    message="the task ended before",
                )
            return _refuse(result.task_id, Reason.TASK_UNKNOWN, "the run sent no such task")
        failures = {failed.sample_index: failed.failure for failed in result.failures}
        unsent = Failure(
            reason=Reason.ROLLOUT_INVALID, message="no sound rollout came, and no failure"
        )
        self._end(member, assignment)
        for index in sorted(assignment.open_indexes):
            failure = failures.get(index, unsent)
            is_counted = failure.reason not in _ORDERLY
            self._fail_if_held(assignment, index, failure, now, is_counted=is_counted)
        return _accept(result.task_id)

    def nack(self, member: RaasMember, task_id: TaskId, failure: Failure, now: datetime) -> None:
        """Take a task back unstarted; one that is not held changes nothing."""
        assignment = member.assignments.get(task_id)
        if assignment is None:
            return
        self._end(member, assignment)
        is_counted = failure.reason not in _ORDERLY
        if failure.reason is Reason.VERSION_NOT_SERVED and assignment.is_eval:
            # Not asked again for these versions, so the attempt need not count.
            pinned = {(p, v.min) for p, v in assignment.task.versions.items() if v.min is not None}
            member.refused |= pinned
            member.pinned -= pinned
            is_counted = False
        member.is_draining |= failure.reason is Reason.MEMBER_DRAINING
        self._reissue(assignment, failure, now, is_counted=is_counted)

    def lose(
        self, member: RaasMember, assignment: Assignment, now: datetime, *, is_lost: bool
    ) -> None:
        """Issue again what a member held whose session ended."""
        self._end(member, assignment)
        if assignment.open_indexes:
            assignment.group.lost[assignment.task_id] = assignment
            assignment.group.loss_count += is_lost
        member.reissued_count += bool(assignment.open_indexes)
        failure = Failure(
            reason=Reason.MEMBER_LOST,
            message=f"the session of {member.name} ended",
            retryable=True,
        )
        self._reissue(assignment, failure, now, is_counted=is_lost)

    def expire(self, now: datetime) -> None:
        """Issue again what is out for too long; its RaaS keeps the credit until it answers."""
        deadlines = self._state.deadlines
        while deadlines and deadlines[0][0] <= now:
            assignment = self._state.assignments.get(deadlines.popleft()[1])
            if assignment is None or assignment.is_withdrawn:
                continue
            self._outbound.withdraw(assignment, CancelReason.DEADLINE)
            failure = Failure(
                reason=Reason.TASK_EXPIRED,
                message=f"task {assignment.task_id} had no result after {self._state.task_ttl}",
                retryable=True,
            )
            self._reissue(assignment, failure, now, is_counted=True)

    def recall(self, policy: Policy, now: datetime) -> None:
        """Issue again what waits for a version of a policy that nobody can have any more."""
        reach = newest_in_reach(self._state, policy)
        failure = Failure(
            reason=Reason.VERSION_NOT_SERVED,
            message=f"nobody has the version of {policy.policy_id} that the task waits for",
            retryable=True,
        )
        for assignment in list(self._state.assignments.values()):
            if waits_in_vain(self._state, policy, assignment, reach):
                self._outbound.withdraw(assignment, CancelReason.VERSION_LOST)
                self._reissue(assignment, failure, now, is_counted=False)

    @property
    def next_deadline(self) -> datetime | None:
        """When the first task has been out for too long."""
        deadlines = self._state.deadlines
        while deadlines and deadlines[0][1] not in self._state.assignments:
            deadlines.popleft()
        return deadlines[0][0] if deadlines else None

    def _measure(self, member: RaasMember, rollout: Rollout, seconds: float) -> None:
        count = sum(trajectory.sampled_count for trajectory in rollout.trajectories)
        if count:
            member.speed.note(
                seconds=seconds, token_count=count, outstanding=member.outstanding + 1
            )
            speeds = (other.speed for other in self._state.sessions.pool)
            self._state.measured.note(count, speeds)

    def _keep(self, member: RaasMember, group: Group, rollout: Rollout, now: datetime) -> None:
        member.accepted_count += 1
        if isinstance(group, TrainGroup):
            entry = Entry(
                rollout=rollout,
                prompt_id=group.prompt.prompt_id,
                member_id=member.member_id,
                placements={},
            )
            self._state.records.add(entry)
            self._training.accept(group, rollout.sample_index, entry, now)
        elif isinstance(group, EvalGroup):
            self._evaluation.accept(group, rollout.sample_index, rollout)
        self._state.do(
            RecordRollout(
                member_id=member.member_id,
                rollout=rollout,
                prompt=group.prompt,
                purpose=group.purpose,
            )
        )

    def _reissue(
        self, assignment: Assignment, failure: Failure, now: datetime, *, is_counted: bool
    ) -> None:
        for index in sorted(assignment.open_indexes):
            self._fail_if_held(assignment, index, failure, now, is_counted=is_counted)

    def _fail_if_held(
        self,
        assignment: Assignment,
        index: int,
        failure: Failure,
        now: datetime,
        *,
        is_counted: bool,
    ) -> None:
        group = self._state.groups.get(assignment.group.group_id)
        if group is not None and not group.slots[index].is_done:
            self._fail(group, index, failure, now, is_counted=is_counted, by=assignment.task_id)

    def _fail(
        self,
        group: Group,
        index: int,
        failure: Failure,
        now: datetime,
        *,
        is_counted: bool,
        by: TaskId,
    ) -> None:
        """Have a sample issued again, or give it up; one that is out elsewhere stays there."""
        if group.slots[index].holder != by:
            return
        attempts = self._state.settings.rollouts.max_attempts
        is_over = group.fail(index, failure, max_attempts=attempts, is_counted=is_counted)
        if isinstance(group, TrainGroup):
            if is_over:
                self._training.give_up(group, index, failure.reason, now)
            else:
                self._training.queue(group)
        elif isinstance(group, EvalGroup):
            if is_over:
                self._evaluation.give_up(group, index)
            else:
                self._evaluation.queue(group)

    def _end(self, member: RaasMember, assignment: Assignment) -> None:
        member.release(assignment)
        del self._state.assignments[assignment.task_id]

    def _fault(self, rollout: Rollout, assignment: Assignment) -> tuple[Reason, str] | None:
        """Say what about a rollout contradicts its task, or None."""
        task = assignment.task
        if rollout.group_id != task.group_id or rollout.sample_index not in task.sample_indexes:
            return Reason.ROLLOUT_INVALID, f"task {task.task_id} did not ask for this sample"
        for trajectory in rollout.trajectories:
            for span in trajectory.version_spans:
                policy_id = span.policy_id or trajectory.policy_id
                bounds = task.versions.get(policy_id)
                if bounds is None or trajectory.policy_id not in task.versions:
                    return Reason.POLICY_UNKNOWN, f"the workflow does not sample {policy_id}"
                if span.version > self._state.policies[policy_id].versions.newest_version:
                    return Reason.VERSION_UNKNOWN, f"{policy_id} has no version {span.version}"
                if bounds.max is not None and span.version not in bounds:
                    return Reason.VERSION_NOT_SERVED, f"{policy_id} is pinned to {bounds.max}"
        return None

    def _unknown(self, rollout: Rollout, group: Group | None) -> ItemAck:
        """Answer for a task that the sender does not hold (any more)."""
        index = rollout.sample_index
        is_known = self._state.mint.has_minted(
            "group", rollout.group_id
        ) or self._state.mint.has_minted("eval-group", rollout.group_id)
        if not is_known:
            return _refuse(rollout.rollout_id, Reason.TASK_UNKNOWN, "the run sent no such task")
        if group is None or (index < group.size and group.slots[index].is_done):
            return self._duplicate(rollout, group)
        return ItemAck(
            item_id=rollout.rollout_id,
            disposition=Disposition.DROPPED,
            reason=Reason.TASK_UNKNOWN,
            message=f"task {rollout.task_id} is not held; its samples are asked for elsewhere",
        )

    def _late(self, rollout: Rollout, assignment: Assignment, group: Group | None) -> ItemAck:
        """Answer for a sample that is settled while its task is still open."""
        if not assignment.is_withdrawn:
            return self._duplicate(rollout, group)
        return ItemAck(
            item_id=rollout.rollout_id,
            disposition=Disposition.DROPPED,
            reason=Reason.TASK_CANCELLED,
            message="nobody waits for it any more",
        )

    def _duplicate(self, rollout: Rollout, group: Group | None) -> ItemAck:
        policies = (
            group.policies
            if isinstance(group, TrainGroup)
            else {trajectory.policy_id for trajectory in rollout.trajectories}
        )
        if not isinstance(group, EvalGroup):
            for policy_id in sorted(policies & self._state.policies.keys()):
                self._state.policies[policy_id].books.duplicates += 1
        return ItemAck(
            item_id=rollout.rollout_id,
            disposition=Disposition.DUPLICATE,
            reason=Reason.DUPLICATE,
            message="this sample is settled",
        )


def _accept(item_id: str) -> ItemAck:
    return ItemAck(item_id=item_id, disposition=Disposition.ACCEPTED)


def _refuse(item_id: str, reason: Reason, message: str) -> ItemAck:
    return ItemAck(
        item_id=item_id, disposition=Disposition.REJECTED, reason=reason, message=message
    )
