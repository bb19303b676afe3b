"""Which part of a run an event is for; one line per kind."""

from datetime import datetime
from typing import Any

from astraflow.core import events as ev
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.parts import Parts


def take(parts: Parts, event: ev.Event, now: datetime) -> Any:
    """Hand an event to the part that it is for; return its answer.

    Raises:
        AstraflowError: As the event's docstring says; nothing has changed then.
    """
    if isinstance(event, ev.WorkEvent):
        return _take_work(parts, event, now)
    if isinstance(event, ev.BatchEvent):
        return _take_batch(parts, event, now)
    if isinstance(event, ev.SessionEvent):
        return _take_session(parts, event, now)
    if isinstance(event, ev.VersionEvent):
        return _take_version(parts, event, now)
    if isinstance(event, ev.PromptEvent):
        return _take_prompts(parts, event, now)
    return _take_run(parts, event, now)


def _take_work(parts: Parts, event: ev.WorkEvent, now: datetime) -> Any:
    sessions, intake = parts.state.sessions, parts.intake
    match event:
        case ev.RolloutArrived(member_id=member_id, rollout=rollout):
            return intake.rollout(sessions.raas(member_id), rollout, now)
        case ev.RolloutRepeated(member_id=member_id):
            sessions.raas(member_id)
            return intake.repeat(event)
        case ev.TaskFinished(member_id=member_id, result=result):
            return intake.result(sessions.raas(member_id), result, now)
        case ev.CreditGiven():
            return parts.membership.give_credit(event)
        case ev.TaskNacked(member_id=member_id, task_id=task_id, failure=failure):
            return intake.nack(sessions.raas(member_id), task_id, failure, now)


def _take_batch(parts: Parts, event: ev.BatchEvent, now: datetime) -> Any:
    member = parts.state.sessions.trainer(event.member_id)
    match event:
        case ev.BatchAcked():
            return parts.batching.ack(member, event, now)
        case ev.BatchStreamOpened():
            parts.batching.open_stream(member, event)
            if not event.rank:
                parts.membership.remind(member, now)
            return None


def _take_session(parts: Parts, event: ev.SessionEvent, now: datetime) -> Any:
    match event:
        case ev.MemberKeptAlive(member_id=member_id, load=load):
            return parts.membership.keep_alive(member_id, load, now)
        case ev.FailureReported(member_id=member_id, failure=failure):
            parts.state.sessions.get(member_id)
            return parts.state.failures.note(failure, now)
        case ev.RaasJoined():
            return parts.joining.join_pool(event, now)
        case ev.TrainerRegistered():
            return parts.joining.register(event, now)
        case ev.SessionLeft(member_id=member_id, message=message):
            return parts.membership.leave(member_id, message, now)
        case ev.MemberDrained(member_id=member_id, grace=grace):
            return parts.membership.drain(member_id, grace, now)


def _take_version(parts: Parts, event: ev.VersionEvent, now: datetime) -> Any:
    match event:
        case ev.VersionPublished():
            return _publish(parts, event, now)
        case ev.VersionReported(member_id=member_id, report=report):
            return parts.membership.report(member_id, report)
        case ev.PublishRequested(member_id=member_id, policy_id=policy_id):
            parts.state.sessions.raas(member_id)
            return parts.pacing.request(parts.state.policy(policy_id))


def _take_prompts(parts: Parts, event: ev.PromptEvent, now: datetime) -> Any:
    training, evaluation = parts.training, parts.evaluation
    match event:
        case ev.PromptsOffered(prompts=prompts, is_again=True):
            return training.prompts.offer_again(prompts)
        case ev.PromptsOffered(prompts=prompts, data_set=data_set, is_last=is_last):
            return training.prompts.offer(prompts, data_set=data_set, is_last=is_last)
        case ev.PromptRequeued(prompt_id=prompt_id):
            return training.requeue(prompt_id)
        case ev.EvalPromptsOffered(eval_run_id=eval_run_id, prompts=prompts):
            return evaluation.offer(eval_run_id, prompts)
        case ev.EvalCreated():
            return evaluation.request(event, now)
        case ev.EvalCancelled(eval_run_id=eval_run_id):
            return evaluation.cancel(eval_run_id, now)


def _take_run(parts: Parts, event: ev.RunEvent, now: datetime) -> None:
    flow = parts.state.flow
    match event:
        case ev.Ticked():
            _tick(parts, now)
        case ev.RunPaused():
            flow.is_paused = True
        case ev.RunResumed():
            flow.is_paused = False
        case ev.SaveRequested(checkpoint_id=checkpoint_id):
            parts.saving.request(checkpoint_id)
        case ev.RunStopped(mode=mode, grace=grace):
            parts.ending.stop(mode, grace, now)
        case ev.HubRestarted():
            _restart(parts, now)
        case ev.RunBroken(failure=failure):
            flow.fail(failure)


def _tick(parts: Parts, now: datetime) -> None:
    parts.membership.expire(now)
    parts.intake.expire(now)


def _restart(parts: Parts, now: datetime) -> None:
    parts.membership.renew_all(now)
    parts.training.prompts.draw_again()
    parts.evaluation.draw_again()
    parts.ending.begin_again(now)
    parts.balance.begin_again(now)


def _publish(parts: Parts, event: ev.VersionPublished, now: datetime) -> int:
    """Enter a version; those who pull it are told when they may see it."""
    state, info = parts.state, event.info
    member = state.sessions.trainer(event.member_id)
    policy = state.policy(info.policy_id)
    if member.policy_id != info.policy_id:
        raise AstraflowError(
            Reason.ROLE_NOT_ALLOWED,
            f"{event.member_id} trains {member.policy_id}, not {info.policy_id}",
        )
    newest = policy.versions.newest
    is_new = info.version == policy.versions.next_version
    if policy.versions.publish(info, now):
        if is_new:
            policy.progress.note_version()
            if newest is not None and info.step <= newest.step:
                policy.spare()
        parts.pacing.announce_again(policy.versions.get(info.version))
    if is_new and info.policy_id == state.settings.workflow.policy_ids[0]:
        parts.training.prompts.begin_version(info.version)
    return policy.versions.next_version
