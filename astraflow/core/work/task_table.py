"""Open work: groups with an unanswered sample, and the tasks that ask the pool for them."""

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta

from astraflow.core.effects import Effects, SendCancellation, SendTask
from astraflow.core.groups import Assignment, EvalGroup, SampleGroup
from astraflow.core.ids import GroupId, IdGenerator, PolicyId, TaskId, WorkflowId
from astraflow.core.pool.live_members import LiveRaas
from astraflow.core.settings import RunSettings
from astraflow.core.tasks import (
    CancelReason,
    RolloutTask,
    SamplingParams,
    TaskPurpose,
    VersionRange,
)

_PRIORITIES = {TaskPurpose.TRAIN: 0, TaskPurpose.EVAL: 1}


class TaskTable:
    """What is open: it sends tasks, withdraws them, and knows when they are out for too long.

    Attributes:
        groups: That have an unanswered sample, in the order of their issue.
        assignments: Tasks at a RaaS, in the order of their issue.
        ttl: How long a task may be out. A rollout may take its timeout; a task may wait about as
            long for a place or a version.
    """

    def __init__(self, settings: RunSettings, *, ids: IdGenerator, effects: Effects) -> None:
        self._groups: dict[GroupId, SampleGroup] = {}
        self._assignments: dict[TaskId, Assignment] = {}
        self.groups: Mapping[GroupId, SampleGroup] = self._groups
        self.assignments: Mapping[TaskId, Assignment] = self._assignments
        # In the order of their issue, which is that of time.
        self._deadlines = deque[tuple[datetime, TaskId]]()
        self._ids = ids
        self._effects = effects
        self._timeout = settings.rollouts.timeout
        self.ttl = 2 * self._timeout + timedelta(seconds=30)
        sampling = {
            policy.policy_id: replace(policy.sampling, seed=settings.seed)
            for policy in settings.policies
        }
        self._sampling: Mapping[WorkflowId, Mapping[PolicyId, SamplingParams]] = {
            workflow.workflow_id: {p: sampling[p] for p in workflow.policy_ids}
            for workflow in settings.workflows
        }

    def open(self, group: SampleGroup) -> None:
        self._groups[group.group_id] = group

    def close(self, group: SampleGroup) -> None:
        """Forget a group of which every sample is answered or given up."""
        del self._groups[group.group_id]

    def knew_group(self, group_id: GroupId) -> bool:
        """Whether a group is or was open."""
        has_issued = self._ids.has_issued
        return has_issued("group", group_id) or has_issued("eval-group", group_id)

    def knew_task(self, task_id: TaskId) -> bool:
        """Whether a task is or was at a RaaS."""
        return self._ids.has_issued("task", task_id)

    def send(
        self,
        group: SampleGroup,
        member: LiveRaas,
        *,
        indexes: tuple[int, ...],
        versions: Mapping[PolicyId, VersionRange],
        now: datetime,
    ) -> int:
        """Ask a RaaS for samples of a group; return how many of them were asked for before."""
        # Before the samples are out: then it is one more.
        attempt = group.attempt
        task_id = TaskId(self._ids.next("task"))
        repeats = group.hand_out(indexes, task_id)
        sampling = self._sampling[group.workflow_id]
        if isinstance(group, EvalGroup) and group.sampling:
            sampling = {p: replace(knobs, **group.sampling) for p, knobs in sampling.items()}
        deadline = now + self.ttl
        task = RolloutTask(
            task_id=task_id,
            group_id=group.group_id,
            attempt=attempt,
            purpose=group.purpose,
            workflow_id=group.workflow_id,
            prompt=group.prompt,
            sample_indexes=indexes,
            versions=versions,
            sampling=sampling,
            deadline=deadline,
            timeout=self._timeout,
            priority=_PRIORITIES[group.purpose],
            session_affinity=group.group_id,
            eval_run_id=group.eval_run_id if isinstance(group, EvalGroup) else None,
        )
        assignment = Assignment(
            task=task,
            member_id=member.member_id,
            group=group,
            open_indexes=set(indexes),
            issue_time=now,
        )
        member.hold(assignment)
        self._assignments[task_id] = assignment
        self._deadlines.append((deadline, task_id))
        self._effects.do(SendTask(member_id=member.member_id, task=task))
        return repeats

    def end(self, member: LiveRaas, assignment: Assignment) -> None:
        """Forget a task whose result came, or whose session ended."""
        member.release(assignment)
        del self._assignments[assignment.task_id]

    def withdraw(
        self, assignment: Assignment, reason: CancelReason, *, indexes: tuple[int, ...] = ()
    ) -> None:
        """Cancel some samples of a task, none named: what is left of it; its result is due."""
        if assignment.is_withdrawn:
            return
        assignment.is_withdrawn = not indexes
        self._effects.do(
            SendCancellation(
                member_id=assignment.member_id,
                task_id=assignment.task_id,
                reason=reason,
                sample_indexes=indexes,
            )
        )

    def withdraw_group(self, group: SampleGroup, reason: CancelReason) -> None:
        """Cancel all tasks of a group, and forget it."""
        del self._groups[group.group_id]
        for holder in dict.fromkeys(slot.holder for slot in group.slots):
            if holder is not None:
                self.withdraw(self._assignments[holder], reason)

    def take_overdue(self, now: datetime) -> Assignment | None:
        """Return the next task that is out for too long, each once; None: no other is."""
        while self._deadlines and self._deadlines[0][0] <= now:
            assignment = self._assignments.get(self._deadlines.popleft()[1])
            if assignment is not None and not assignment.is_withdrawn:
                return assignment
        return None

    @property
    def next_deadline(self) -> datetime | None:
        """When the first task has been out for too long."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][1] not in self._assignments:
            deadlines.popleft()
        return deadlines[0][0] if deadlines else None
