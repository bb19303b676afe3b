"""The whole hub as a pure state machine: `apply(event, now)` answers and says what to do.

No I/O, no clock, no chance: the same events at the same times give the same run. The parts
that it is made of share one `State`; this module only puts them together:

- `joining` and `membership` hold sessions;
- `training` and `evaluation` decide what is asked of the pool, `outbound` sends it, `intake`
  takes what comes of it;
- `batching` is what trainers get, `pacing` keeps policies within their distance;
- `ending` sees a run to its end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from astraflow.core import events as ev
from astraflow.core.autoscale import ScaleAdvice
from astraflow.core.balance import Balance
from astraflow.core.batching import Batching
from astraflow.core.effects import Effect
from astraflow.core.ending import Ending
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.eval_schedule import EvalSchedule
from astraflow.core.evals import EvalRun, EvalSuite
from astraflow.core.evaluation import Evaluation
from astraflow.core.ids import EvalRunId, MemberId, PolicyId, TaskId
from astraflow.core.intake import Intake
from astraflow.core.joining import Joining
from astraflow.core.loading import Loading
from astraflow.core.membership import Membership
from astraflow.core.outbound import Outbound
from astraflow.core.pacing import Pacing
from astraflow.core.refusals import Refusal, refusal_of
from astraflow.core.settings import RunSettings
from astraflow.core.sources import sources_of, version_with_sources
from astraflow.core.state import State
from astraflow.core.status import DeadLetter, LedgerAccount, RolloutRecord, RunStatus, WaitReason
from astraflow.core.training import Training
from astraflow.core.versions import Source, VersionInfo
from astraflow.core.views import run_status
from astraflow.core.waits import explain


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What came of an event.

    Attributes:
        answer: To the caller; its type is named in the event's docstring.
        effects: To be carried out in order.
    """

    answer: Any
    effects: tuple[Effect, ...]


class Run:
    """One run, from its first member to its last."""

    def __init__(self, settings: RunSettings, *, start_time: datetime) -> None:
        self._state = State(settings, start_time=start_time)
        outbound = Outbound(self._state)
        self._training = Training(self._state, outbound)
        self._evaluation = Evaluation(self._state, outbound)
        self._schedule = EvalSchedule(self._state, self._evaluation)
        self._pacing = Pacing(self._state, self._schedule)
        self._loading = Loading(self._state)
        self._batching = Batching(self._state, self._training)
        self._balance = Balance(self._state, self._training)
        self._intake = Intake(
            self._state, outbound, training=self._training, evaluation=self._evaluation
        )
        self._membership = Membership(self._state, intake=self._intake, batching=self._batching)
        self._joining = Joining(self._state, batching=self._batching, membership=self._membership)
        self._ending = Ending(
            self._state,
            training=self._training,
            batching=self._batching,
            evaluation=self._evaluation,
            schedule=self._schedule,
        )

    def apply(self, event: ev.Event, now: datetime, *, goes_on: bool = False) -> Decision:
        """Decide what comes of an event.

        Args:
            event: What happens.
            now: When.
            goes_on: Whether another event follows at once that came together with this one: unless
                a group became whole, what comes of both is decided with that one.

        Raises:
            AstraflowError: As the event's docstring says; nothing has changed then.
        """
        changes_nothing = self._membership.is_heard(event, now)
        group_count = len(self._state.groups)
        try:
            answer = self._take(event, now)
        except AstraflowError:
            self._state.take_effects()
            raise
        if changes_nothing or (goes_on and len(self._state.groups) == group_count):
            return Decision(answer=answer, effects=self._state.take_effects())
        self._state.flow.fail(self._state.faults.first)
        for policy_id in self._pacing.advance(now):
            self._intake.recall(self._state.policies[policy_id], now)
        self._loading.advance(now)
        self._evaluation.advance(now)
        self._batching.advance(now)
        if not self._evaluation.is_reading:
            self._issue(now)
        self._ending.advance(now)
        self._balance.advance(now)
        return Decision(answer=answer, effects=self._state.take_effects())

    def refusal(self, event: ev.RolloutArrived) -> Refusal | None:
        """Return what would be said to a rollout that is of no use; None: apply it.

        Raises:
            AstraflowError: SESSION_ENDED.
        """
        self._state.sessions.raas(event.member_id)
        return refusal_of(self._state, event)

    @property
    def next_deadline(self) -> datetime | None:
        """When to apply Ticked; None: nothing is due. Read it again after every event."""
        due = (
            self._state.sessions.next_end,
            self._intake.next_deadline,
            self._evaluation.next_deadline,
            self._ending.next_deadline,
            self._pacing.next_deadline,
            self._loading.next_deadline,
        )
        return min((time for time in due if time is not None), default=None)

    def status(self, now: datetime) -> RunStatus:
        """Return the whole state."""
        return run_status(self._state, self._ending.run_state, now)

    def accounts(self) -> tuple[LedgerAccount, ...]:
        """Return the books."""
        return tuple(policy.books.account() for policy in self._state.policies.values())

    def explain(self, policy_id: PolicyId, now: datetime) -> tuple[WaitReason, ...]:
        """Return what a policy's trainer waits for, link by link; empty: nothing.

        Raises:
            AstraflowError: POLICY_UNKNOWN.
        """
        return explain(self._state, self._training, self._state.policy(policy_id), now)

    def scale_advice(self, now: datetime, window: timedelta | None = None) -> ScaleAdvice:
        """Return how large the pool should be; window None: that of the settings."""
        return self._balance.advice(now, window)

    def versions(
        self, policy_id: PolicyId, caller: MemberId | None = None
    ) -> tuple[VersionInfo, ...]:
        """Return what can be pulled, oldest first, with sources, best first for the caller.

        Raises:
            AstraflowError: POLICY_UNKNOWN.
        """
        listed = self._state.policy(policy_id).versions.listed
        return tuple(version_with_sources(self._state.sessions, info, caller) for info in listed)

    def version_for(self, info: VersionInfo, caller: MemberId) -> VersionInfo:
        """Return what was announced with the sources that are best for one member now."""
        try:
            sources = self.sources(info.policy_id, info.version, caller)
        except AstraflowError:
            # No longer listed: what was announced is all there is.
            return info
        return replace(info, sources=sources)

    def sources(
        self, policy_id: PolicyId, version: int, caller: MemberId | None = None
    ) -> tuple[Source, ...]:
        """Return who has a version, best first for the caller.

        Raises:
            AstraflowError: POLICY_UNKNOWN, VERSION_UNKNOWN, VERSION_EVICTED.
        """
        info = self._state.policy(policy_id).versions.get(version)
        return sources_of(self._state.sessions, info, caller)

    @property
    def drawn_counts(self) -> Mapping[str, int]:
        """Training prompts that were offered so far: where each data set stands."""
        return self._training.prompts.drawn_counts

    @property
    def open_task_ids(self) -> frozenset[TaskId]:
        """Tasks whose end is still to come."""
        return frozenset(self._state.assignments)

    def suites(self) -> tuple[EvalSuite, ...]:
        """Return the evaluations that can be asked for."""
        return tuple(suite.suite for suite in self._state.settings.suites)

    def eval_run(self, eval_run_id: EvalRunId) -> EvalRun:
        """Return where an evaluation stands.

        Raises:
            AstraflowError: EVAL_UNKNOWN.
        """
        return self._evaluation.view(eval_run_id)

    def rollouts(self) -> Sequence[RolloutRecord]:
        """Return the rollouts that can be listed, newest first."""
        return self._state.records.newest_first()

    def dead_letters(self) -> Sequence[DeadLetter]:
        """Return the prompts given up, newest first."""
        return list(self._state.dead_letters)[::-1]

    def _take(self, event: ev.Event, now: datetime) -> Any:  # noqa: PLR0911, PLR0912
        """Hand an event to the part that it is for; one line per kind."""
        sessions, flow = self._state.sessions, self._state.flow
        match event:
            case ev.RolloutArrived(member_id=member_id, rollout=rollout):
                return self._intake.rollout(sessions.raas(member_id), rollout, now)
            case ev.RolloutRepeated(member_id=member_id):
                sessions.raas(member_id)
                return self._intake.repeat(event)
            case ev.TaskFinished(member_id=member_id, result=result):
                return self._intake.result(sessions.raas(member_id), result, now)
            case ev.MemberKeptAlive(member_id=member_id, load=load):
                return self._membership.keep_alive(member_id, load, now)
            case ev.Ticked():
                return self._tick(now)
            case ev.CreditGiven():
                return self._membership.give_credit(event)
            case ev.TaskNacked(member_id=member_id, task_id=task_id, failure=failure):
                return self._intake.nack(sessions.raas(member_id), task_id, failure, now)
            case ev.BatchAcked(member_id=member_id):
                return self._batching.ack(sessions.trainer(member_id), event, now)
            case ev.BatchStreamOpened(member_id=member_id):
                return self._batching.open_stream(sessions.trainer(member_id), event)
            case ev.VersionPublished():
                return self._publish(event, now)
            case ev.VersionReported(member_id=member_id, report=report):
                return self._membership.report(member_id, report)
            case ev.PublishRequested(member_id=member_id, policy_id=policy_id):
                sessions.raas(member_id)
                return self._pacing.request(self._state.policy(policy_id))
            case ev.PromptsOffered(prompts=prompts, data_set=data_set, is_last=is_last):
                return self._training.prompts.offer(prompts, data_set=data_set, is_last=is_last)
            case ev.EvalPromptsOffered(eval_run_id=eval_run_id, prompts=prompts):
                return self._evaluation.offer(eval_run_id, prompts)
            case ev.EvalCreated():
                return self._evaluation.request(event, now)
            case ev.EvalCancelled(eval_run_id=eval_run_id):
                return self._evaluation.cancel(eval_run_id, now)
            case ev.RaasJoined():
                return self._joining.join_pool(event, now)
            case ev.TrainerRegistered():
                return self._joining.register(event, now)
            case ev.SessionLeft(member_id=member_id, message=message):
                return self._membership.leave(member_id, message, now)
            case ev.PromptRequeued(prompt_id=prompt_id):
                return self._training.requeue(prompt_id)
            case ev.MemberDrained(member_id=member_id, grace=grace):
                return self._membership.drain(member_id, grace, now)
            case ev.RunPaused():
                flow.is_paused = True
            case ev.RunResumed():
                flow.is_paused = False
            case ev.RunStopped(mode=mode, grace=grace):
                return self._ending.stop(mode, grace, now)
            case ev.HubRestarted():
                self._restart(now)
            case ev.RunBroken(failure=failure):
                flow.fail(failure)
        return None

    def _issue(self, now: datetime) -> None:
        was_through = self._training.is_through
        self._training.advance(now)
        if self._training.is_through and not was_through:
            # The last prompts were passed over: what is whole may be the last batch.
            self._batching.advance(now)

    def _restart(self, now: datetime) -> None:
        self._membership.renew_all(now)
        self._training.prompts.draw_again()
        self._evaluation.draw_again()
        self._ending.begin_again(now)
        self._balance.begin_again(now)

    def _tick(self, now: datetime) -> None:
        self._membership.expire(now)
        self._intake.expire(now)

    def _publish(self, event: ev.VersionPublished, now: datetime) -> int:
        """Enter a version; those who pull it are told when they may see it."""
        member = self._state.sessions.trainer(event.member_id)
        info = event.info
        policy = self._state.policy(info.policy_id)
        if member.policy_id != info.policy_id:
            raise AstraflowError(
                Reason.ROLE_NOT_ALLOWED,
                f"{event.member_id} trains {member.policy_id}, not {info.policy_id}",
            )
        is_new = info.version == policy.versions.next_version
        policy.is_asked &= not is_new
        if policy.versions.publish(info, now):
            if is_new:
                policy.note_version()
            self._pacing.announce_again(policy.versions.get(info.version))
        if is_new and info.policy_id == self._state.settings.workflow.policy_ids[0]:
            self._training.prompts.begin_version(info.version)
        return policy.versions.next_version
