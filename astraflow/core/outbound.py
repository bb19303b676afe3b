"""Outbound: turns samples of a group into a task at a RaaS."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime

from astraflow.core.effects import SendCancellation, SendTask
from astraflow.core.groups import Assignment, EvalGroup, SampleGroup
from astraflow.core.ids import PolicyId, TaskId, WorkflowId
from astraflow.core.live_members import LiveRaas
from astraflow.core.state import State
from astraflow.core.tasks import (
    CancelReason,
    RolloutTask,
    SamplingParams,
    TaskPurpose,
    VersionRange,
)

_PRIORITIES = {TaskPurpose.TRAIN: 0, TaskPurpose.EVAL: 1}


class TaskSender:
    """Sends and withdraws tasks."""

    def __init__(self, state: State) -> None:
        self._state = state
        sampling = {
            policy.policy_id: replace(policy.sampling, seed=state.settings.seed)
            for policy in state.settings.policies
        }
        self._sampling: Mapping[WorkflowId, Mapping[PolicyId, SamplingParams]] = {
            workflow.workflow_id: {p: sampling[p] for p in workflow.policy_ids}
            for workflow in state.settings.workflows
        }

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
        task_id = TaskId(self._state.ids.next("task"))
        repeats = group.hand_out(indexes, task_id)
        sampling = self._sampling[group.workflow_id]
        if isinstance(group, EvalGroup) and group.sampling:
            sampling = {p: replace(knobs, **group.sampling) for p, knobs in sampling.items()}
        self._issue(
            RolloutTask(
                task_id=task_id,
                group_id=group.group_id,
                attempt=attempt,
                purpose=group.purpose,
                workflow_id=group.workflow_id,
                prompt=group.prompt,
                sample_indexes=indexes,
                versions=versions,
                sampling=sampling,
                deadline=now + self._state.task_ttl,
                timeout=self._state.settings.rollouts.timeout,
                priority=_PRIORITIES[group.purpose],
                session_affinity=group.group_id,
                eval_run_id=group.eval_run_id if isinstance(group, EvalGroup) else None,
            ),
            group,
            member,
            now,
        )
        return repeats

    def _issue(
        self, task: RolloutTask, group: SampleGroup, member: LiveRaas, now: datetime
    ) -> None:
        """Note who has a task and until when, and send it."""
        state = self._state
        assignment = Assignment(
            task=task,
            member_id=member.member_id,
            group=group,
            open_indexes=set(task.sample_indexes),
            issue_time=now,
        )
        member.hold(assignment)
        state.assignments[task.task_id] = assignment
        state.deadlines.append((now + state.task_ttl, task.task_id))
        state.do(SendTask(member_id=member.member_id, task=task))

    def withdraw(self, assignment: Assignment, reason: CancelReason) -> None:
        """Cancel what is left of a task; its result is still due."""
        if assignment.is_withdrawn:
            return
        assignment.is_withdrawn = True
        self._state.do(
            SendCancellation(
                member_id=assignment.member_id, task_id=assignment.task_id, reason=reason
            )
        )

    def withdraw_sample(self, assignment: Assignment, index: int, reason: CancelReason) -> None:
        """Cancel one sample of a task; the result of the task is still due."""
        if not assignment.is_withdrawn:
            self._state.do(
                SendCancellation(
                    member_id=assignment.member_id,
                    task_id=assignment.task_id,
                    reason=reason,
                    sample_indexes=(index,),
                )
            )

    def withdraw_group(self, group: SampleGroup, reason: CancelReason) -> None:
        """Cancel all tasks of a group, and forget it."""
        del self._state.groups[group.group_id]
        for holder in dict.fromkeys(slot.holder for slot in group.slots):
            if holder is not None:
                self.withdraw(self._state.assignments[holder], reason)
