"""Which part of a run an event is for; one line per kind."""

from datetime import datetime
from typing import Any

from astraflow.core import events as ev
from astraflow.core.components import Components
from astraflow.core.errors import AstraflowError, Reason


def dispatch(run: Components, event: ev.Event, now: datetime) -> Any:
    """Hand an event to the part that it is for; return its answer.

    Raises:
        AstraflowError: As the event's docstring says; nothing has changed then.
    """
    if isinstance(event, ev.WorkEvent):
        return _dispatch_work(run, event, now)
    if isinstance(event, ev.BatchEvent):
        return _dispatch_batch(run, event, now)
    if isinstance(event, ev.SessionEvent):
        return _dispatch_session(run, event, now)
    if isinstance(event, ev.VersionEvent):
        return _dispatch_version(run, event, now)
    if isinstance(event, ev.PromptEvent):
        return _dispatch_prompts(run, event, now)
    return _dispatch_run(run, event, now)


def _dispatch_work(run: Components, event: ev.WorkEvent, now: datetime) -> Any:
    sessions, intake = run.state.sessions, run.intake
    match event:
        case ev.RolloutArrived(member_id=member_id, rollout=rollout):
            return intake.rollout(sessions.raas(member_id), rollout, now)
        case ev.RolloutRepeated(member_id=member_id):
            sessions.raas(member_id)
            return intake.repeat(event)
        case ev.TaskFinished(member_id=member_id, result=result):
            return intake.result(sessions.raas(member_id), result, now)
        case ev.CreditGiven():
            return run.membership.give_credit(event)
        case ev.TaskNacked(member_id=member_id, task_id=task_id, failure=failure):
            return intake.nack(sessions.raas(member_id), task_id, failure, now)


def _dispatch_batch(run: Components, event: ev.BatchEvent, now: datetime) -> Any:
    member = run.state.sessions.trainer(event.member_id)
    match event:
        case ev.BatchAcked():
            return run.batching.ack(member, event, now)
        case ev.BatchStreamOpened():
            run.batching.open_stream(member, event)
            if not event.rank:
                run.membership.remind(member, now)
            return None


def _dispatch_session(run: Components, event: ev.SessionEvent, now: datetime) -> Any:
    match event:
        case ev.MemberKeptAlive(member_id=member_id, load=load):
            return run.membership.keep_alive(member_id, load, now)
        case ev.FailureReported(member_id=member_id, failure=failure):
            run.state.sessions.get(member_id)
            return run.state.failures.note(failure, now)
        case ev.RaasJoined():
            return run.joining.join_pool(event, now)
        case ev.TrainerRegistered():
            return run.joining.register(event, now)
        case ev.MemberLeft(member_id=member_id, message=message):
            return run.membership.leave(member_id, message, now)
        case ev.MemberDrained(member_id=member_id, grace=grace):
            return run.membership.drain(member_id, grace, now)


def _dispatch_version(run: Components, event: ev.VersionEvent, now: datetime) -> Any:
    match event:
        case ev.VersionPublished():
            return _publish(run, event, now)
        case ev.VersionReported(member_id=member_id, report=report):
            return run.membership.report(member_id, report)
        case ev.PublishRequested(member_id=member_id, policy_id=policy_id):
            run.state.sessions.raas(member_id)
            return run.pacing.request(run.state.policy(policy_id))


def _dispatch_prompts(run: Components, event: ev.PromptEvent, now: datetime) -> Any:
    training, evaluation = run.training, run.evaluation
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


def _dispatch_run(run: Components, event: ev.RunEvent, now: datetime) -> None:
    flow = run.state.lifecycle
    match event:
        case ev.Ticked():
            _tick(run, now)
        case ev.RunPaused():
            flow.is_paused = True
        case ev.RunResumed():
            flow.is_paused = False
        case ev.SaveRequested(checkpoint_id=checkpoint_id):
            run.saving.request(checkpoint_id)
        case ev.RunStopped(mode=mode, grace=grace):
            run.ending.stop(mode, grace, now)
        case ev.HubRestarted():
            _restart(run, now)
        case ev.RunBroken(failure=failure):
            flow.fail(failure)


def _tick(run: Components, now: datetime) -> None:
    run.membership.expire(now)
    run.intake.expire(now)


def _restart(run: Components, now: datetime) -> None:
    run.membership.renew_all(now)
    run.training.prompts.draw_again()
    run.evaluation.draw_again()
    run.ending.begin_again(now)
    run.balance.begin_again(now)


def _publish(run: Components, event: ev.VersionPublished, now: datetime) -> int:
    """Enter a version; those who pull it are told when they may see it."""
    state, info = run.state, event.info
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
        run.pacing.announce_again(policy.versions.get(info.version))
    if is_new and info.policy_id == state.settings.workflow.policy_ids[0]:
        run.training.prompts.begin_version(info.version)
    return policy.versions.next_version
