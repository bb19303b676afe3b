"""Waits: why a trainer has no batch, link by link."""

from collections.abc import Iterator
from datetime import datetime

from astraflow.core.components import Components
from astraflow.core.groups import TrainGroup
from astraflow.core.policy.state import PolicyState, newest_versions
from astraflow.core.pool.live_members import LiveRaas, LiveTrainer
from astraflow.core.status import WaitCause, WaitReason
from astraflow.core.work.pacing import PolicyStanding

# So many members are named where any of them would do.
_NAMED = 4


def explain(run: Components, policy: PolicyState, now: datetime) -> tuple[WaitReason, ...]:
    """Return what a policy's trainer waits for; empty: nothing waits.

    The subject of a link is the waiter of the next.
    """
    if policy.end is not None:
        return ()
    waiter = policy.policy_id
    trainer = run.sessions.trainers.get(waiter)
    if trainer is None:
        return (_link(WaitCause.NO_TRAINER, waiter, f"no trainer of {waiter} has joined"),)
    table = policy.lease_table
    absent = sorted(set(range(table.world_size)) - table.streams.keys())
    if absent or not table.streams:
        message = f"{trainer.name} has joined and has not asked for batches yet"
        if table.streams:
            names = ", ".join(map(str, absent[:_NAMED]))
            message = f"ranks of {trainer.name} that have not asked for batches yet: {names}"
        return (_link(WaitCause.NO_TRAINER, waiter, message),)
    if not table.has_capacity:
        return tuple(_held(run, policy, trainer, now))
    blocker = run.pacing.blocker_of(policy)
    if blocker is not None:
        return (_barrier(run, policy, blocker),)
    return tuple(_too_few(run, policy, now))


def _held(
    run: Components, policy: PolicyState, trainer: LiveTrainer, now: datetime
) -> Iterator[WaitReason]:
    batch_id = next(iter(policy.lease_table.leases), "")
    message = f"the trainer holds the {len(policy.lease_table.leases)} batches that it asked for"
    yield _link(WaitCause.BATCH_HELD, policy.policy_id, message, subject_id=batch_id)
    if run.sessions.is_silent(trainer, now):
        yield _silent(run, trainer, batch_id)


def _silent(run: Components, member: LiveRaas | LiveTrainer, waiter_id: str) -> WaitReason:
    return WaitReason(
        cause=WaitCause.MEMBER_SILENT,
        waiter_id=waiter_id,
        message=f"{member.name} is silent",
        since_time=member.keep_alive_time,
        resolve_time=run.sessions.end_of(member),
    )


def _barrier(run: Components, policy: PolicyState, blocker: PolicyStanding) -> WaitReason:
    gone = "" if blocker.has_trainer else ", which has no trainer"
    return WaitReason(
        cause=WaitCause.VERSION_BARRIER,
        waiter_id=policy.policy_id,
        subject_id=blocker.policy_id,
        message=f"{policy.policy_id} is at version {policy.progress.made_version} and waits "
        f"for {blocker.policy_id} at {blocker.made_version}{gone}",
        since_time=blocker.departure_time,
        resolve_time=run.pacing.deadline_of(blocker.policy_id),
    )


def _too_few(run: Components, policy: PolicyState, now: datetime) -> Iterator[WaitReason]:
    waiter = policy.policy_id
    wanted = policy.samples.fresh_per_batch
    groups = (each for each in run.tasks.groups.values() if isinstance(each, TrainGroup))
    group = next((each for each in groups if waiter in each.policies), None)
    yield _link(
        WaitCause.TOO_FEW_GROUPS,
        waiter,
        f"{len(policy.samples.buffer)} of {wanted} groups are whole",
        subject_id="" if group is None else group.group_id,
    )
    dropped = policy.samples.completion.filtered_in_a_row
    if dropped >= wanted:
        by = policy.samples.completion.last_filter
        bound = run.settings.rollouts.max_filtered_groups
        message = (
            f"filters dropped the last {dropped} groups, the last one {by}; {bound} end the run"
        )
        yield _link(WaitCause.ALL_DROPPED, waiter, message)
    if run.lifecycle.is_held:
        yield _link(WaitCause.PAUSED, waiter, "an operator paused the run")
        return
    if group is not None:
        yield from _incomplete(run, group, now)
    if group is None or group.unissued or policy.samples.has_slot:
        yield from _not_issued(run, waiter, now)


def _incomplete(run: Components, group: TrainGroup, now: datetime) -> Iterator[WaitReason]:
    holders = [slot.holder for slot in group.slots if slot.holder is not None]
    task_id = holders[0] if holders else ""
    yield _link(
        WaitCause.GROUP_INCOMPLETE,
        group.group_id,
        f"group {group.group_id} lacks {group.open_count} of {group.size}",
        subject_id=task_id,
    )
    if not holders:
        return
    assignment = run.tasks.assignments[holders[0]]
    member = run.sessions.raas(assignment.member_id)
    yield WaitReason(
        cause=WaitCause.TASK_RUNNING,
        waiter_id=task_id,
        subject_id=member.member_id,
        message=f"task {task_id} is at {member.name}",
        since_time=assignment.issue_time,
        resolve_time=assignment.task.deadline,
    )
    for policy_id, bounds in assignment.task.versions.items():
        live = member.live.get(policy_id, -1)
        if bounds.min is not None and live < bounds.min:
            has = "no version" if live < 0 else f"version {live}"
            message = f"{member.name} has {has} of {policy_id}, the task needs {bounds.min}"
            yield _link(WaitCause.VERSION_NOT_LIVE, member.member_id, message)
    if run.sessions.is_silent(member, now):
        yield _silent(run, member, member.member_id)


def _not_issued(run: Components, waiter: str, now: datetime) -> Iterator[WaitReason]:
    """Say why no more is asked of the pool."""
    policy_ids = run.settings.workflow.policy_ids
    pool = [
        member
        for member in run.sessions.pool.values()
        if member.serves(policy_ids)
        and not member.is_draining
        and not run.sessions.is_silent(member, now)
    ]
    ready = [member for member in pool if member.is_ready(policy_ids)]
    full = next((each for each in run.pacing.live_policies if not each.samples.has_slot), None)
    if not pool:
        yield _link(WaitCause.NO_RAAS, waiter, "no RaaS serves the workflow's policies")
    elif newest_versions(run.policies, policy_ids) is None or not ready:
        names = ", ".join(member.name for member in pool[:_NAMED])
        message = f"no RaaS has loaded the weights yet; there are {names}"
        yield _link(WaitCause.VERSION_NOT_LIVE, waiter, message)
    elif full is not None:
        yield _link(
            WaitCause.STALENESS_LIMIT,
            waiter,
            f"{full.samples.open_count} groups of {full.policy_id} are open, "
            f"{full.samples.open_limit} may be",
            subject_id=full.policy_id,
        )
    elif run.training.needs_capacity and not any(member.free_count for member in ready):
        out = sum(member.outstanding for member in ready)
        given = sum(member.max_outstanding for member in ready)
        yield _link(WaitCause.NO_CREDIT, waiter, f"{out} samples are out of a credit of {given}")


def _link(cause: WaitCause, waiter_id: str, message: str, *, subject_id: str = "") -> WaitReason:
    return WaitReason(cause=cause, waiter_id=waiter_id, subject_id=subject_id, message=message)
