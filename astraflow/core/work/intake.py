"""Intake: what a RaaS sends back, what is answered, and what becomes of undone work."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from astraflow.core.effects import Effects, RecordRollout
from astraflow.core.errors import Failure, Reason
from astraflow.core.events import RolloutArrived, RolloutRepeated
from astraflow.core.groups import Assignment, EvalGroup, SampleGroup, TrainGroup
from astraflow.core.ids import GroupId, MemberId, PolicyId, RolloutId, TaskId
from astraflow.core.lifecycle import RunLifecycle
from astraflow.core.policy.state import PolicyState
from astraflow.core.pool.capacity import Measured
from astraflow.core.pool.live_members import LiveRaas
from astraflow.core.pool.sessions import Sessions
from astraflow.core.rollouts import Disposition, ItemAck, Outcome, Rollout, TaskResult
from astraflow.core.samples import AcceptedRollout, RolloutRecords
from astraflow.core.settings import RunSettings
from astraflow.core.tasks import CancelReason, TaskPurpose
from astraflow.core.work.evaluation import Evaluation
from astraflow.core.work.failures import FailureLog
from astraflow.core.work.pacing import PolicyPacing
from astraflow.core.work.task_table import TaskTable
from astraflow.core.work.training import Training

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


def is_late(rollout: Rollout, member_id: MemberId, group: SampleGroup | None) -> bool:
    """Whether it is of a task that its sender held, unanswered, in an earlier session."""
    lost = None if group is None else group.lost.get(rollout.task_id)
    if lost is None or lost.member_id != member_id:
        return False
    return rollout.sample_index in lost.open_indexes and rollout.outcome not in UNDONE


def _ack(item_id: str, disposition: Disposition, reason: Reason, message: str) -> ItemAck:
    return ItemAck(item_id=item_id, disposition=disposition, reason=reason, message=message)


def _refused(item_id: str, reason: Reason, message: str) -> ItemAck:
    return _ack(item_id, Disposition.REJECTED, reason, message)


def _not_sampled(rollout: Rollout, policy_id: PolicyId) -> ItemAck:
    why = f"the workflow does not sample {policy_id}"
    return _refused(rollout.rollout_id, Reason.POLICY_UNKNOWN, why)


def _repeated(rollout_id: RolloutId) -> ItemAck:
    return _ack(rollout_id, Disposition.DUPLICATE, Reason.DUPLICATE, "this sample is settled")


# Handed back in good order: it does not count as a failed attempt.
_ORDERLY = frozenset({Reason.MEMBER_DRAINING, Reason.TASK_CANCELLED})


@dataclass(slots=True, kw_only=True, eq=False)
class Intake:
    """Takes rollouts, results and tasks given back."""

    settings: RunSettings
    policies: Mapping[PolicyId, PolicyState]
    sessions: Sessions
    tasks: TaskTable
    training: Training
    evaluation: Evaluation
    pacing: PolicyPacing
    measured: Measured
    records: RolloutRecords
    failures: FailureLog
    lifecycle: RunLifecycle
    effects: Effects

    def refusal(self, event: RolloutArrived) -> Refusal | None:
        """Return what a rollout comes to that is of no use; None: it has to be looked at whole."""
        rollout, member_id = event.rollout, event.member_id
        assignment = self.tasks.assignments.get(rollout.task_id)
        group = self.tasks.groups.get(rollout.group_id)
        if assignment is None or assignment.member_id != member_id:
            if is_late(rollout, member_id, group):
                return None
            return self._refusal(event, self._unknown_ack(rollout, group), group)
        fault = self._fault_of(rollout, assignment)
        if fault is not None:
            return Refusal(ack=fault)
        index = rollout.sample_index
        if index in assignment.open_indexes or not (group is None or group.slots[index].is_done):
            return None
        return self._refusal(event, self._closed_ack(rollout, assignment), group)

    def refusal_of_name(self, rollout: Rollout) -> Refusal | None:
        """Return what a rollout comes to whose id another sample of its group has; None: none has.

        It is no part of `refusal`: journals have such rollouts, which earlier releases took.
        """
        group = self.tasks.groups.get(rollout.group_id)
        if isinstance(group, TrainGroup) and any(
            sample.entry.rollout.rollout_id == rollout.rollout_id
            for samples in group.samples.values()
            for index, sample in samples.items()
            if index != rollout.sample_index
        ):
            why = "another sample of its group has this rollout_id"
            return Refusal(ack=_refused(rollout.rollout_id, Reason.ROLLOUT_INVALID, why))
        return None

    def rollout(
        self, member: LiveRaas, event: RolloutArrived, now: datetime, *, is_useful: bool = False
    ) -> ItemAck:
        """Take a rollout, whole or not at all; one that is useful has no `refusal`."""
        rollout = event.rollout
        refusal = None if is_useful else self.refusal(event)
        if refusal is not None:
            if refusal.event is not None:
                self._count_repeat(refusal.event.policy_ids)
            return refusal.ack
        assignment = self.tasks.assignments.get(rollout.task_id)
        group = self.tasks.groups.get(rollout.group_id)
        index = rollout.sample_index
        if assignment is None or assignment.member_id != member.member_id:
            return self._from_before(member, self.tasks.groups[rollout.group_id], rollout, now)
        if index in assignment.open_indexes:
            assignment.open_indexes.discard(index)
            member.count(assignment, -1)
        else:
            # Its pace is measured anew, whatever its credit.
            member.enter()
        if group is None or group.slots[index].is_done:
            return self._answer(rollout, self._closed_ack(rollout, assignment), group)
        if rollout.outcome in UNDONE:
            failure = rollout.failure or Failure(reason=Reason.INTERNAL)
            self._note(group, failure, now)
            is_counted = rollout.outcome is not Outcome.RETURNED
            self._fail(assignment, index, failure, now, is_counted=is_counted)
        else:
            self._note(group, rollout.failure, now)
            token_count = sum([each.sampled_count for each in rollout.trajectories])
            if token_count:
                seconds = (now - assignment.issue_time).total_seconds()
                # Its credit was given back before.
                outstanding = member.outstanding + 1
                member.speed.note(seconds=seconds, token_count=token_count, outstanding=outstanding)
                speeds = (other.speed for other in self.sessions.pool.values())
                is_eval = isinstance(group, EvalGroup)
                self.measured.note(token_count, speeds, is_eval=is_eval)
            self._keep(member, group, rollout, now)
        return ItemAck(item_id=rollout.rollout_id, disposition=Disposition.ACCEPTED)

    def _from_before(
        self, member: LiveRaas, group: SampleGroup, rollout: Rollout, now: datetime
    ) -> ItemAck:
        """Use a rollout of a task that was lost with an earlier session.

        Whoever was asked for the sample since then is told not to bother.
        """
        index = rollout.sample_index
        fault = self._fault_of(rollout, group.lost[rollout.task_id])
        if fault is not None:
            return fault
        if group.slots[index].is_done:
            return self._answer(rollout, self._unknown_ack(rollout, group), group)
        holder = self.tasks.assignments.get(group.slots[index].holder or TaskId(""))
        if holder is not None:
            self.tasks.withdraw(holder, CancelReason.GROUP_DONE, indexes=(index,))
        self._keep(member, group, rollout, now)
        return ItemAck(item_id=rollout.rollout_id, disposition=Disposition.ACCEPTED)

    def repeat(self, event: RolloutRepeated) -> ItemAck:
        self._count_repeat(event.policy_ids)
        return _repeated(event.rollout_id)

    def result(self, member: LiveRaas, result: TaskResult, now: datetime) -> ItemAck:
        """Close a task; what it left unanswered is issued again."""
        assignment = member.assignments.get(result.task_id)
        if assignment is None:
            if self.tasks.knew_task(result.task_id):
                why = "the task ended before"
                return _ack(result.task_id, Disposition.DUPLICATE, Reason.DUPLICATE, why)
            return _refused(result.task_id, Reason.TASK_UNKNOWN, "the run sent no such task")
        failures = {failed.sample_index: failed.failure for failed in result.failures}
        unsent = Failure(
            reason=Reason.ROLLOUT_INVALID, message="no sound rollout came, and no failure"
        )
        self.tasks.end(member, assignment)
        for index in sorted(assignment.open_indexes):
            failure = failures.get(index, unsent)
            self._note(assignment.group, failure, now)
            is_counted = failure.reason not in _ORDERLY
            self._fail(assignment, index, failure, now, is_counted=is_counted)
        return ItemAck(item_id=result.task_id, disposition=Disposition.ACCEPTED)

    def nack(self, member: LiveRaas, task_id: TaskId, failure: Failure, now: datetime) -> None:
        """Take a task back unstarted; one that is not held changes nothing."""
        assignment = member.assignments.get(task_id)
        if assignment is None:
            return
        self.tasks.end(member, assignment)
        self.failures.note(failure, now)
        is_counted = failure.reason not in _ORDERLY
        if failure.reason is Reason.VERSION_NOT_SERVED and assignment.is_eval:
            # Not asked again for these versions, so the attempt need not count.
            pinned = {(p, v.min) for p, v in assignment.task.versions.items() if v.min is not None}
            member.refuse(pinned)
            is_counted = False
        if failure.reason is Reason.MEMBER_DRAINING and not member.is_draining:
            member.is_draining, member.drain_time = True, None
        self._reissue(assignment, failure, now, is_counted=is_counted)

    def lose_all(self, member: LiveRaas, now: datetime, *, is_lost: bool) -> None:
        """Issue again what a member held whose session ended, unless it may have ended it."""
        failure = Failure(
            reason=Reason.MEMBER_LOST,
            message=f"the session of {member.name} ended",
            retryable=True,
        )
        counted = set[GroupId]()
        for assignment in list(member.assignments.values()):
            group = assignment.group
            self.tasks.end(member, assignment)
            if assignment.open_indexes:
                # It is one member, however many tasks of a group it held.
                group.lose(assignment, is_lost=is_lost and group.group_id not in counted)
                counted.add(group.group_id)
                member.reissued_count += 1
            self._reissue(assignment, failure, now, is_counted=False)
            if is_lost and group.loss_count >= self.settings.rollouts.max_lost:
                self._give_up(group, now)

    def _give_up(self, group: SampleGroup, now: datetime) -> None:
        """Issue no more of a prompt that member after member was lost with."""
        if group.group_id not in self.tasks.groups:
            return
        failure = Failure(
            reason=Reason.PROMPT_POISONED,
            message=f"{group.loss_count} members were lost while they held samples of prompt "
            f"{group.prompt.prompt_id} (rollouts.max_lost); see whether it is what kills them",
        )
        for index in group.unissued:
            self._try_again(group, index, failure, now, is_counted=False)

    def expire(self, now: datetime, *, is_counted: bool = True) -> None:
        """Issue again what is out for too long; its RaaS keeps the credit until it answers.

        Args:
            now: What is due by then.
            is_counted: Whether it is a failed attempt of its samples.
        """
        while (assignment := self.tasks.take_overdue(now)) is not None:
            self.tasks.withdraw(assignment, CancelReason.DEADLINE)
            failure = Failure(
                reason=Reason.TASK_EXPIRED,
                message=f"task {assignment.task_id} had no result after {self.tasks.ttl}",
                retryable=True,
            )
            self._reissue(assignment, failure, now, is_counted=is_counted)

    def recall(self, policy: PolicyState, now: datetime) -> None:
        """Issue again what waits for a version of a policy that nobody can have any more."""
        available = self.pacing.newest_available(policy)
        failure = Failure(
            reason=Reason.VERSION_NOT_SERVED,
            message=f"nobody has the version of {policy.policy_id} that the task waits for",
            retryable=True,
        )
        for assignment in list(self.tasks.assignments.values()):
            if self.pacing.waits_in_vain(policy, assignment, available):
                self.tasks.withdraw(assignment, CancelReason.VERSION_LOST)
                self._reissue(assignment, failure, now, is_counted=False)

    def _keep(self, member: LiveRaas, group: SampleGroup, rollout: Rollout, now: datetime) -> None:
        member.accepted_count += 1
        if isinstance(group, TrainGroup):
            entry = AcceptedRollout(
                rollout=rollout,
                prompt_id=group.prompt.prompt_id,
                member_id=member.member_id,
                placements={},
            )
            self.records.add(entry)
            self.training.accept(group, rollout.sample_index, entry, now)
        elif isinstance(group, EvalGroup):
            self.evaluation.accept(group, rollout.sample_index, rollout)
        self.effects.do(
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
            self._fail(assignment, index, failure, now, is_counted=is_counted)

    def _fail(
        self,
        assignment: Assignment,
        index: int,
        failure: Failure,
        now: datetime,
        *,
        is_counted: bool,
    ) -> None:
        """Have a sample issued again, or give it up; one that is out elsewhere stays there."""
        group = assignment.group
        is_open = group.group_id in self.tasks.groups
        if is_open and group.slots[index].holder == assignment.task_id:
            self._try_again(group, index, failure, now, is_counted=is_counted)

    def _try_again(
        self,
        group: SampleGroup,
        index: int,
        failure: Failure,
        now: datetime,
        *,
        is_counted: bool,
    ) -> None:
        attempts = self.settings.rollouts.max_attempts
        is_over = group.fail(index, failure, max_attempts=attempts, is_counted=is_counted)
        if isinstance(group, TrainGroup):
            if is_over:
                self.training.give_up(group, index, failure.reason, now)
            else:
                self.training.queue(group)
        elif isinstance(group, EvalGroup):
            if is_over:
                self.evaluation.give_up(group, index)
            else:
                self.evaluation.queue(group)

    def _note(self, group: SampleGroup, failure: Failure | None, now: datetime) -> None:
        """Count what came to an end; too many failures of training end the run."""
        failures, lifecycle = self.failures, self.lifecycle
        if isinstance(group, TrainGroup):
            failures.finish(failure, now)
            if failure is not None and lifecycle.failure is None:
                lifecycle.fail(failures.unbearable(self.settings.rollouts.max_failed_share))
        elif failure is not None:
            failures.note(failure, now)

    def _answer(self, rollout: Rollout, ack: ItemAck, group: SampleGroup | None) -> ItemAck:
        if ack.disposition is Disposition.DUPLICATE:
            self._count_repeat(self._repeaters(rollout, group))
        return ack

    def _refusal(self, event: RolloutArrived, ack: ItemAck, group: SampleGroup | None) -> Refusal:
        if ack.disposition is not Disposition.DUPLICATE:
            return Refusal(ack=ack)
        repetition = RolloutRepeated(
            member_id=event.member_id,
            rollout_id=event.rollout.rollout_id,
            policy_ids=self._repeaters(event.rollout, group),
        )
        return Refusal(ack=ack, event=repetition)

    def _closed_ack(self, rollout: Rollout, assignment: Assignment) -> ItemAck:
        """Answer for a sample that is settled while its task is still open."""
        if not assignment.is_withdrawn:
            return _repeated(rollout.rollout_id)
        why = "nobody waits for it any more"
        return _ack(rollout.rollout_id, Disposition.DROPPED, Reason.TASK_CANCELLED, why)

    def _unknown_ack(self, rollout: Rollout, group: SampleGroup | None) -> ItemAck:
        """Answer for a task that the sender does not hold (any more)."""
        index = rollout.sample_index
        if not self.tasks.knew_group(rollout.group_id):
            return _refused(rollout.rollout_id, Reason.TASK_UNKNOWN, "the run sent no such task")
        if group is None or (index < group.size and group.slots[index].is_done):
            return _repeated(rollout.rollout_id)
        why = f"task {rollout.task_id} is not held; its samples are asked for elsewhere"
        return _ack(rollout.rollout_id, Disposition.DROPPED, Reason.TASK_UNKNOWN, why)

    def _fault_of(  # noqa: PLR0911 - a flat list of checks
        self, rollout: Rollout, assignment: Assignment
    ) -> ItemAck | None:
        """Refuse a rollout that contradicts its task; None: it does not."""
        task = assignment.task
        if rollout.group_id != task.group_id or rollout.sample_index not in task.sample_indexes:
            why = f"task {task.task_id} did not ask for this sample"
            return _refused(rollout.rollout_id, Reason.ROLLOUT_INVALID, why)
        for trajectory in rollout.trajectories:
            if trajectory.sampling.is_reshaped and task.purpose is TaskPurpose.TRAIN:
                knobs = ", ".join(trajectory.sampling.reshaped_by)
                why = f"{knobs} reshaped what was sampled, which trainers cannot score"
                return _refused(rollout.rollout_id, Reason.ROLLOUT_INVALID, why)
            if trajectory.payload is not None and not self.settings.takes_payloads:
                why = "the run has no payload store"
                return _refused(rollout.rollout_id, Reason.ROLLOUT_INVALID, why)
            if trajectory.policy_id not in task.versions:
                # Also where nothing was sampled: rollouts are recorded under its name.
                return _not_sampled(rollout, trajectory.policy_id)
            for span in trajectory.version_spans:
                policy_id = span.policy_id or trajectory.policy_id
                bounds = task.versions.get(policy_id)
                if bounds is None:
                    return _not_sampled(rollout, policy_id)
                if span.version >= self.policies[policy_id].versions.next_version:
                    why = f"{policy_id} has no version {span.version}"
                    return _refused(rollout.rollout_id, Reason.VERSION_UNKNOWN, why)
                if bounds.max is not None and span.version not in bounds:
                    why = f"{policy_id} is pinned to {bounds.max}"
                    return _refused(rollout.rollout_id, Reason.VERSION_NOT_SERVED, why)
        return None

    def _repeaters(self, rollout: Rollout, group: SampleGroup | None) -> tuple[PolicyId, ...]:
        """Return the policies in whose books a repetition counts."""
        if isinstance(group, EvalGroup):
            return ()
        policies: Iterable[PolicyId] = {each.policy_id for each in rollout.trajectories}
        if isinstance(group, TrainGroup):
            policies = group.policies
        return tuple(sorted(set(policies) & self.policies.keys()))

    def _count_repeat(self, policy_ids: Iterable[PolicyId]) -> None:
        for policy_id in policy_ids:
            self.policies[policy_id].samples.books.note(duplicates=1)
