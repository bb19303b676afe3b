"""Requests: what may be asked of a run, by whom, which component answers, and its journal field.

The event of a request is what is handled, and what the journal keeps.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, cast

from astraflow.core import events as ev
from astraflow.core.algorithms.finding import Faults
from astraflow.core.control.balance import Balance
from astraflow.core.control.ending import Loading, RunEnding
from astraflow.core.control.joining import Joining
from astraflow.core.control.membership import Membership
from astraflow.core.control.wait_graph import WaitGraph
from astraflow.core.effects import Effects
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import IdGenerator, PolicyId
from astraflow.core.lifecycle import RunLifecycle
from astraflow.core.members import MemberRole
from astraflow.core.policy.state import PolicyState, find_policy
from astraflow.core.pool.capacity import Measured
from astraflow.core.pool.live_members import LiveRaas, LiveTrainer
from astraflow.core.pool.sessions import Sessions
from astraflow.core.rollouts import Disposition, ItemAck
from astraflow.core.samples import RolloutRecords
from astraflow.core.settings import RunSettings
from astraflow.core.work.batching import Batching
from astraflow.core.work.evaluation import EvalSchedule, Evaluation
from astraflow.core.work.failures import DeadLetters, FailureLog
from astraflow.core.work.intake import Intake
from astraflow.core.work.pacing import PolicyPacing
from astraflow.core.work.payloads import PayloadLedger
from astraflow.core.work.prompt_queue import PromptQueue
from astraflow.core.work.saving import Saving
from astraflow.core.work.scheduler import Scheduler
from astraflow.core.work.task_table import TaskTable
from astraflow.core.work.training import Training


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Components:
    """What a run is made of.

    Attributes:
        settings: Of the run.
        lifecycle: How it goes on.
        effects: Of the event in progress.
        policies: By id, in the order of the recipe.
        sessions: Who is here.
        faults: Of data algorithms.
        failures: Of rollouts.
        dead_letters: Prompts given up.
        records: Accepted rollouts that can be listed.
        tasks: What is open.
        pacing: Keeps policies within their distance.
        training: Decides what is asked of the pool for training.
        evaluation: Decides what is asked for evaluations.
        schedule: Begins evaluations by versions.
        loading: Watches that versions are loaded.
        saving: Makes checkpoints of the whole run.
        batching: Gives batches to trainers.
        balance: Measures the pool against the trainers.
        intake: Takes what comes of tasks.
        membership: Keeps sessions and ends them.
        joining: Begins sessions.
        ending: Sees the run to its end.
        payloads: Knows which objects of the payload store are of use.
        waits: Says who waits for whom.
    """

    settings: RunSettings
    lifecycle: RunLifecycle
    effects: Effects
    policies: Mapping[PolicyId, PolicyState]
    sessions: Sessions
    faults: Faults
    failures: FailureLog
    dead_letters: DeadLetters
    records: RolloutRecords
    tasks: TaskTable
    pacing: PolicyPacing
    training: Training
    evaluation: Evaluation
    schedule: EvalSchedule
    loading: Loading
    saving: Saving
    batching: Batching
    balance: Balance
    intake: Intake
    membership: Membership
    joining: Joining
    ending: RunEnding
    payloads: PayloadLedger
    waits: WaitGraph


def assemble(settings: RunSettings, *, start_time: datetime) -> Components:
    """Return the components of a run that begins."""
    ids, effects, faults = IdGenerator(settings.run_id), Effects(), Faults()
    lifecycle = RunLifecycle(start_time=start_time)
    failures, dead_letters, measured = FailureLog(), DeadLetters(), Measured()
    sessions = Sessions(
        ttl=settings.session_ttl, unit=settings.rollouts.unit, has_evals=bool(settings.suites)
    )
    policies = {
        policy.policy_id: PolicyState(policy, settings, faults=faults)
        for policy in settings.policies
    }
    records = RolloutRecords(
        max_count=settings.kept_rollout_count, max_nbytes=settings.kept_rollout_nbytes
    )
    tasks = TaskTable(settings, ids=ids, effects=effects)
    pacing = PolicyPacing(
        settings,
        policies=policies,
        sessions=sessions,
        tasks=tasks,
        lifecycle=lifecycle,
        effects=effects,
    )
    prompts = PromptQueue(
        settings, faults=faults, dead_letters=dead_letters, lifecycle=lifecycle, effects=effects
    )
    training = Training(
        settings,
        prompts=prompts,
        policies=policies,
        sessions=sessions,
        scheduler=Scheduler(settings, policies=policies, sessions=sessions, measured=measured),
        tasks=tasks,
        pacing=pacing,
        failures=failures,
        dead_letters=dead_letters,
        ids=ids,
        lifecycle=lifecycle,
    )
    evaluation = Evaluation(
        settings,
        policies=policies,
        sessions=sessions,
        tasks=tasks,
        ids=ids,
        lifecycle=lifecycle,
        effects=effects,
    )
    schedule = EvalSchedule(settings, policies=policies, evaluation=evaluation, lifecycle=lifecycle)
    saving = Saving(
        policies, sessions=sessions, prompts=prompts, lifecycle=lifecycle, effects=effects
    )
    batching = Batching(
        policies,
        sessions=sessions,
        training=training,
        saving=saving,
        pacing=pacing,
        ids=ids,
        lifecycle=lifecycle,
        effects=effects,
    )
    intake = Intake(
        settings,
        policies=policies,
        sessions=sessions,
        tasks=tasks,
        training=training,
        evaluation=evaluation,
        pacing=pacing,
        measured=measured,
        records=records,
        failures=failures,
        lifecycle=lifecycle,
        effects=effects,
    )
    membership = Membership(
        sessions,
        policies=policies,
        intake=intake,
        batching=batching,
        lifecycle=lifecycle,
        effects=effects,
    )
    return Components(
        settings=settings,
        lifecycle=lifecycle,
        effects=effects,
        policies=policies,
        sessions=sessions,
        faults=faults,
        failures=failures,
        dead_letters=dead_letters,
        records=records,
        tasks=tasks,
        pacing=pacing,
        training=training,
        evaluation=evaluation,
        schedule=schedule,
        loading=Loading(settings, policies=policies, sessions=sessions, lifecycle=lifecycle),
        saving=saving,
        batching=batching,
        balance=Balance(
            settings,
            policies=policies,
            sessions=sessions,
            measured=measured,
            training=training,
            pacing=pacing,
            lifecycle=lifecycle,
        ),
        intake=intake,
        membership=membership,
        joining=Joining(
            settings,
            policies=policies,
            sessions=sessions,
            records=records,
            training=training,
            batching=batching,
            membership=membership,
            ids=ids,
            lifecycle=lifecycle,
            effects=effects,
        ),
        ending=RunEnding(
            settings,
            policies=policies,
            sessions=sessions,
            training=training,
            batching=batching,
            evaluation=evaluation,
            schedule=schedule,
            lifecycle=lifecycle,
            effects=effects,
        ),
        payloads=PayloadLedger(policies, tasks=tasks, lifecycle=lifecycle, effects=effects),
        waits=WaitGraph(
            settings,
            policies=policies,
            sessions=sessions,
            tasks=tasks,
            training=training,
            pacing=pacing,
            lifecycle=lifecycle,
        ),
    )


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


def take(run: Components, event: ev.Event, now: datetime) -> Any:
    """Give an event to the component that it is for; return its answer.

    Raises:
        AstraflowError: SESSION_ENDED, ROLE_NOT_ALLOWED for a sender who may not; as the event's
            docstring says. Nothing has changed then.
    """
    kind, asked = REQUESTS[type(event)], cast("Any", event)
    if kind.sender is MemberRole.RAAS:
        return kind.handle(run, run.sessions.raas(asked.member_id), asked, now)
    if kind.sender is MemberRole.TRAINER:
        return kind.handle(run, run.sessions.trainer(asked.member_id), asked, now)
    return kind.handle(run, asked, now)


def _take_rollout(
    run: Components, member: LiveRaas, event: ev.RolloutArrived, now: datetime
) -> ItemAck:
    ack = run.intake.rollout(member, event.rollout, now)
    if ack.disposition is Disposition.ACCEPTED:
        run.payloads.note(event.rollout)
    return ack


def _tick(run: Components, _: ev.Ticked, now: datetime) -> None:
    run.membership.expire(now)
    run.intake.expire(now)


def _restart(run: Components, _: ev.HubRestarted, now: datetime) -> None:
    run.membership.renew_all(now)
    run.training.prompts.draw_again()
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
    if policy.versions.publish(info, now):
        if is_new:
            policy.progress.note_version()
            if newest is not None and info.step <= newest.step:
                policy.samples.spare()
        run.pacing.announce_again(policy.versions.get(info.version))
    if is_new and info.policy_id == run.settings.workflow.policy_ids[0]:
        run.training.prompts.begin_version(info.version)
    return policy.versions.next_version


def _offer(run: Components, event: ev.PromptsOffered) -> None:
    prompts = run.training.prompts
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
    ev.RolloutArrived: _raas("rollout_arrived", _take_rollout),
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
        "eval_prompts_offered", lambda run, e, _now: run.evaluation.offer(e.eval_run_id, e.prompts)
    ),
    ev.Ticked: _other("ticked", _tick),
    ev.HubRestarted: _other("hub_restarted", _restart),
    ev.RunBroken: _other("run_broken", lambda run, e, _now: run.lifecycle.fail(e.failure)),
}
