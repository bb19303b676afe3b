"""Requests: what may be asked of a run, by whom, which component answers, and its journal field.

The event of a request is what is handled, and what the journal keeps.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from astraflow.core import events as ev
from astraflow.core.components import Components
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.members import MemberRole
from astraflow.core.policy.state import find_policy
from astraflow.core.pool.live_members import LiveRaas, LiveTrainer
from astraflow.core.rollouts import Disposition, ItemAck


@dataclass(frozen=True, slots=True)
class RequestKind:
    """What is known of one kind of request.

    Attributes:
        journal: Field of `journal/v1/record.proto` that keeps it.
        sender: Whose session has to be open; None: it comes of the hub, of an operator, or of any
            member, as its handler says.
        handle: Given the components, the sender's session where there has to be one, the event and
            the time, returns the answer.
    """

    journal: str
    sender: MemberRole | None
    handle: Callable[..., Any]


def take_rollout(
    run: Components,
    member: LiveRaas,
    event: ev.RolloutArrived,
    now: datetime,
    *,
    is_useful: bool = False,
) -> ItemAck:
    """Take a rollout; `is_useful` where `Intake.refusal` was asked at this state of the run."""
    ack = run.intake.rollout(member, event, now, is_useful=is_useful)
    if run.settings.takes_payloads and ack.disposition is Disposition.ACCEPTED:
        run.payloads.note(event.rollout)
    return ack


def _tick(run: Components, _: ev.Ticked, now: datetime) -> None:
    run.membership.expire(now)
    run.intake.expire(now)


def _restart(run: Components, event: ev.HubRestarted, now: datetime) -> None:
    if event.step_counts:
        run.ending.reopen(event.step_counts)
        # Whoever has it go on has mended what failed: that is judged anew.
        run.faults.first = None
        run.failures.begin_again()
        run.training.begin_again()
    for member in run.sessions:
        # Nobody could say anything meanwhile.
        member.keep_alive(now)
    run.intake.expire(now, is_counted=False)
    run.prompts.draw_again()
    run.evaluation.draw_again()
    run.ending.begin_again(now)
    run.balance.begin_again(now)


def _publish(
    run: Components, member: LiveTrainer, event: ev.VersionPublished, now: datetime
) -> int:
    """Enter a version; those who pull it are told when they may see it."""
    info = event.info
    policy = find_policy(run.policies, info.policy_id)
    if member.policy_id != info.policy_id:
        raise AstraflowError(
            Reason.ROLE_NOT_ALLOWED,
            f"{event.member_id} trains {member.policy_id}, not {info.policy_id}",
        )
    newest = policy.versions.newest
    is_new = info.version == policy.versions.next_version
    trained = policy.progress.step
    if (
        is_new
        and newest is not None
        and info.restored_from is None
        and info.step <= newest.step < trained
    ):
        # Work would wait for ever for a version that has the steps which were trained.
        advice = "say in `step` how many optimizer steps are behind its weights"
        if policy.end is not None:
            advice = "its data has ended, and none is trained on again: start from a checkpoint"
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"version {info.version} of {info.policy_id} says step={info.step}, no more than "
            f"version {newest.version}, though batches were trained on up to step {trained} since; "
            f"{advice}",
            metadata={"field": "step"},
        )
    if policy.versions.publish(info, now):
        if is_new:
            policy.progress.note_version()
            if newest is not None and info.step <= newest.step:
                policy.samples.spare()
        run.pacing.announce_again(policy.versions.get(info.version))
    if is_new and info.policy_id == run.settings.workflow.policy_ids[0]:
        run.prompts.begin_version(info.version)
    return policy.versions.next_version


def _offer(run: Components, event: ev.PromptsOffered) -> None:
    prompts = run.prompts
    if event.is_again:
        prompts.offer_again(event.prompts)
    else:
        prompts.offer(event.prompts, data_set=event.data_set, is_last=event.is_last)


def _open_stream(
    run: Components, member: LiveTrainer, event: ev.StreamBatches, now: datetime
) -> None:
    run.batching.open_stream(member, event)
    if not event.rank:
        run.membership.remind(member, now)


def _note_failure(run: Components, event: ev.FailureReported, now: datetime) -> None:
    run.sessions.get(event.member_id)
    run.failures.note(event.failure, now)


def _raas(
    journal: str, handle: Callable[[Components, LiveRaas, Any, datetime], Any]
) -> RequestKind:
    return RequestKind(journal, MemberRole.RAAS, handle)


def _trainer(
    journal: str, handle: Callable[[Components, LiveTrainer, Any, datetime], Any]
) -> RequestKind:
    return RequestKind(journal, MemberRole.TRAINER, handle)


def _other(journal: str, handle: Callable[[Components, Any, datetime], Any]) -> RequestKind:
    return RequestKind(journal, None, handle)


REQUESTS: Final[Mapping[type[Any], RequestKind]] = {
    # Nodes.
    ev.RolloutArrived: _raas("rollout_arrived", take_rollout),
    ev.RolloutRepeated: _raas("rollout_repeated", lambda run, _node, e, _now: run.intake.repeat(e)),
    ev.TaskFinished: _raas(
        "task_finished", lambda run, node, e, now: run.intake.result(node, e.result, now)
    ),
    ev.TaskNacked: _raas(
        "task_nacked", lambda run, node, e, now: run.intake.nack(node, e.task_id, e.failure, now)
    ),
    ev.TaskCredit: _raas(
        "credit_given", lambda run, node, e, _now: run.membership.give_credit(node, e)
    ),
    ev.VersionReported: _raas(
        "version_reported", lambda run, node, e, _now: run.membership.report(node, e.report)
    ),
    ev.PublishRequested: _raas(
        "publish_requested",
        lambda run, _node, e, _now: run.pacing.request(find_policy(run.policies, e.policy_id)),
    ),
    # Trainers.
    ev.StreamBatches: _trainer("batch_stream_opened", _open_stream),
    ev.AckBatch: _trainer(
        "batch_acked", lambda run, trainer, e, now: run.batching.ack(trainer, e, now)
    ),
    ev.VersionPublished: _trainer("version_published", _publish),
    # Any member.
    ev.RaasJoined: _other("joined", lambda run, e, now: run.joining.join_pool(e, now)),
    ev.TrainerRegistered: _other("joined", lambda run, e, now: run.joining.register(e, now)),
    ev.MemberKeptAlive: _other(
        "member_kept_alive",
        lambda run, e, now: run.membership.keep_alive(e.member_id, e.load, now),
    ),
    ev.FailureReported: _other("failure_reported", _note_failure),
    ev.MemberLeft: _other(
        "session_left", lambda run, e, now: run.membership.leave(e.member_id, e.message, now)
    ),
    # Operators.
    ev.MemberDrained: _other(
        "member_drained", lambda run, e, now: run.membership.drain(e.member_id, e.grace, now)
    ),
    ev.TokenRevoked: _other("token_revoked", lambda _run, _e, _now: None),
    ev.PromptRequeued: _other(
        "prompt_requeued", lambda run, e, _now: run.training.requeue(e.prompt_id)
    ),
    ev.EvalCreated: _other("eval_created", lambda run, e, now: run.evaluation.request(e, now)),
    ev.EvalCancelled: _other(
        "eval_cancelled", lambda run, e, now: run.evaluation.cancel(e.eval_run_id, now)
    ),
    ev.RunPaused: _other("run_paused", lambda run, _e, _now: run.lifecycle.pause(is_paused=True)),
    ev.RunResumed: _other(
        "run_resumed", lambda run, _e, _now: run.lifecycle.pause(is_paused=False)
    ),
    ev.RunStopped: _other("run_stopped", lambda run, e, now: run.ending.stop(e.mode, e.grace, now)),
    ev.SaveRequested: _other(
        "save_requested", lambda run, e, _now: run.saving.request(e.checkpoint_id)
    ),
    # The hub itself.
    ev.PromptsOffered: _other("prompts_offered", lambda run, e, _now: _offer(run, e)),
    ev.EvalPromptsOffered: _other(
        "eval_prompts_offered", lambda run, e, _now: run.evaluation.offer(e)
    ),
    ev.Ticked: _other("ticked", _tick),
    ev.HubRestarted: _other("hub_restarted", _restart),
    ev.RunBroken: _other("run_broken", lambda run, e, _now: run.lifecycle.fail(e.failure)),
}
