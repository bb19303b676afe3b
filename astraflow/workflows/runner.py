"""Runs a workflow once and says what came of it: always a rollout, never an exception."""

import asyncio
from dataclasses import dataclass, replace

from astraflow.core.clock import Clock, SteadyClock, SystemClock
from astraflow.core.errors import AstraflowError, Failure, Reason
from astraflow.core.ids import PolicyId, WorkflowId
from astraflow.core.rollouts import Outcome, Rollout, Trajectory
from astraflow.rpc.concurrency import first_of
from astraflow.telemetry.tracebacks import bounded, place_of, place_of_definition
from astraflow.telemetry.traces import span
from astraflow.workflows.episode import Episode
from astraflow.workflows.protocol import PolicyFault, Score, Workflow
from astraflow.workflows.scoring import GuardedScorer, checked_score, score_of_fault

# After these, what was sampled is sound and kept.
_KEEPS_TOKENS = frozenset({Reason.SCORER_FAILED, Reason.SCORER_TIMEOUT})
_SYSTEM_CLOCK = SystemClock()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedWorkflow:
    """A workflow with its options, ready to run.

    Attributes:
        workflow_id: Its name in the run.
        workflow: The user's object.
        scorer: That it was made with; None: it scores itself.
        policy_ids: That it samples from; the first is its default.
        scorer_digest: BLAKE3 of the scorer's source, or of the workflow's when it scores.
        policy_fault_reward: Of a PolicyFault that has none of its own.
    """

    workflow_id: WorkflowId
    workflow: Workflow
    scorer: GuardedScorer | None = None
    policy_ids: tuple[PolicyId, ...] = ()
    scorer_digest: bytes = b""
    policy_fault_reward: float = 0.0


async def run_episode(
    loaded: LoadedWorkflow, episode: Episode, *, clock: Clock = _SYSTEM_CLOCK
) -> Rollout:
    """Run one episode within the task's timeout.

    The outcome is SCORED, or TRUNCATED when a budget ended it; POLICY_FAULT when what the policy
    sampled broke it; SCORER_FAILED when there is something to score but the scorer failed;
    INFRA_ERROR, with the failure, for everything else that was raised, an exit included. Only a
    cancellation of the episode goes through, not that of a task which it awaits.
    """
    # One that is set meanwhile makes no episode longer, or end before it began.
    steady = SteadyClock(clock)
    start_time = steady.now()
    task = episode.task
    with span(
        "rl.sample",
        parent=task.traceparent,
        workflow=loaded.workflow_id,
        group=task.group_id,
        sample=episode.sample_index,
    ) as traceparent:
        rollout = await _run(loaded, episode)
    return replace(
        rollout,
        start_time=start_time,
        finish_time=steady.now(),
        traceparent=traceparent or task.traceparent,
    )


async def _run(loaded: LoadedWorkflow, episode: Episode) -> Rollout:
    timeout = episode.task.timeout
    limit_s = None if timeout is None else timeout.total_seconds()
    deadline = asyncio.timeout(limit_s)
    try:
        async with deadline:
            score = await loaded.workflow.run(episode)
        return _scored(loaded, episode, score)
    # A user's code raises anything; it costs one rollout.
    except (Exception, SystemExit, asyncio.CancelledError) as raised:
        itself = asyncio.current_task()
        is_withdrawn = itself is not None and itself.cancelling() > 0
        if is_withdrawn and isinstance(raised, asyncio.CancelledError):
            raise
        if deadline.expired():
            message = f"workflow {loaded.workflow_id} took longer than {limit_s:g} s (timeout_s)"
            failure = _failure(Reason.ROLLOUT_TIMEOUT, message, raised)
            return _rollout(loaded, episode, Outcome.INFRA_ERROR, failure=failure)
        return _failed(loaded, episode, first_of(raised))


def _scored(loaded: LoadedWorkflow, episode: Episode, score: Score | float) -> Rollout:
    what = f"workflow {loaded.workflow_id}"
    score = checked_score(score, what=what, made_by=loaded.workflow.run)
    trajectories = episode.trajectories()
    if not trajectories:
        message = f"{what} ended without sampling a token"
        place = place_of_definition(loaded.workflow.run, name="NothingSampled", said=message)
        raise AstraflowError(
            Reason.ENVIRONMENT_FAILED, message, cause=place.cause, traceback=place.traceback
        )
    outcome = Outcome.TRUNCATED if score.truncated else Outcome.SCORED
    return _rollout(loaded, episode, outcome, score=score, trajectories=trajectories)


def _failed(loaded: LoadedWorkflow, episode: Episode, error: BaseException) -> Rollout:
    try:
        trajectories = episode.trajectories()
    except Exception as unsound:  # noqa: BLE001 - an engine of a user's tells anything
        message = f"what was sampled cannot be sent: {unsound}"
        failure = _failure(Reason.ENGINE_FAILED, message, unsound)
        return _rollout(loaded, episode, Outcome.INFRA_ERROR, failure=failure)
    if isinstance(error, PolicyFault):
        return _policy_fault(loaded, episode, error, trajectories)
    if not isinstance(error, AstraflowError):
        message = f"workflow {loaded.workflow_id} raised {type(error).__name__}: {error}"
        failure = _failure(Reason.ENVIRONMENT_FAILED, message, error)
        return _rollout(loaded, episode, Outcome.INFRA_ERROR, failure=failure)
    # Nothing of what a session sampled may be trained on.
    if error.reason is Reason.CONTEXT_TOO_LONG and trajectories:
        return _rollout(loaded, episode, Outcome.TRUNCATED, trajectories=trajectories)
    place = place_of(error)
    failure = replace(
        error.to_failure(),
        message=bounded(error.message),
        cause=place.cause,
        traceback=place.traceback,
    )
    if error.reason not in _KEEPS_TOKENS or not episode.has_sampled:
        return _rollout(loaded, episode, Outcome.INFRA_ERROR, failure=failure)
    return _rollout(
        loaded, episode, Outcome.SCORER_FAILED, failure=failure, trajectories=trajectories
    )


def _policy_fault(
    loaded: LoadedWorkflow,
    episode: Episode,
    fault: PolicyFault,
    trajectories: tuple[Trajectory, ...],
) -> Rollout:
    if not episode.has_sampled:
        message = (
            f"workflow {loaded.workflow_id} raised a PolicyFault before the policy sampled a "
            f"token: {fault.message}"
        )
        failure = _failure(Reason.ENVIRONMENT_FAILED, message, fault)
        return _rollout(loaded, episode, Outcome.INFRA_ERROR, failure=failure)
    score, outcome = None, Outcome.POLICY_FAULT
    failure = _failure(Reason.POLICY_FAULT, fault.message, fault)
    try:
        worth = score_of_fault(fault, loaded.policy_fault_reward)
        score = checked_score(worth, what="a PolicyFault", made_by=None)
    except AstraflowError as error:
        outcome = Outcome.SCORER_FAILED
        failure = _failure(Reason.SCORER_FAILED, error.message, fault)
    return _rollout(
        loaded, episode, outcome, score=score, failure=failure, trajectories=trajectories
    )


def _failure(reason: Reason, message: str, error: BaseException) -> Failure:
    place = place_of(error)
    return Failure(
        reason=reason,
        message=bounded(message),
        retryable=reason is not Reason.POLICY_FAULT,
        cause=place.cause,
        traceback=place.traceback,
    )


def _rollout(
    loaded: LoadedWorkflow,
    episode: Episode,
    outcome: Outcome,
    *,
    score: Score | None = None,
    failure: Failure | None = None,
    trajectories: tuple[Trajectory, ...] = (),
) -> Rollout:
    """Return a rollout that does not say yet when it was made."""
    return Rollout(
        rollout_id=episode.rollout_id,
        task_id=episode.task.task_id,
        group_id=episode.task.group_id,
        sample_index=episode.sample_index,
        outcome=outcome,
        reward=None if score is None else score.reward,
        reward_parts={} if score is None else score.parts,
        failure=failure,
        reward_code_digest=loaded.scorer_digest,
        trajectories=trajectories,
        metrics={} if score is None else score.metrics,
    )
