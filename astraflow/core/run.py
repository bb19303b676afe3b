"""The whole hub as a pure state machine: `apply(event, now)` answers and says what to do.

No I/O, no clock, no chance: the same events at the same times give the same run. The components
that it is made of have each their own data, and are given who they call:

- `joining` and `membership` open sessions and end them;
- `training` and `evaluation` decide what is asked of the pool, `scheduler` says of whom,
  `task_table` sends it, `intake` takes what comes of it;
- `batching` is what trainers get, `pacing` keeps policies within their distance, `saving` makes
  checkpoints of all of them;
- `ending` sees a run to its end.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, cast

from astraflow.core import events as ev
from astraflow.core.autoscale import ScaleAdvice
from astraflow.core.components import Components
from astraflow.core.effects import Decision
from astraflow.core.errors import AstraflowError
from astraflow.core.evals import EvalRun, EvalSuiteInfo
from astraflow.core.ids import EvalRunId, MemberId, PolicyId, TaskId
from astraflow.core.members import MemberRole
from astraflow.core.policy.state import PolicyState, find_policy
from astraflow.core.pool.live_members import LiveRaas
from astraflow.core.pool.sources import sources_of, version_with_sources
from astraflow.core.requests import REQUESTS, take_rollout
from astraflow.core.settings import RunSettings
from astraflow.core.status import (
    DeadLetter,
    LedgerAccount,
    PolicyStatus,
    RolloutPlace,
    RolloutRecord,
    RunStatus,
    SavedRun,
    WaitReason,
)
from astraflow.core.versions import SourceInfo, VersionInfo
from astraflow.core.wait_graph import explain
from astraflow.core.work.intake import Refusal


def _policy_status(policy: PolicyState) -> PolicyStatus:
    newest, samples, window = policy.versions.newest, policy.samples, policy.window
    return PolicyStatus(
        policy_id=policy.policy_id,
        version=None if newest is None else newest.version,
        step=policy.progress.step,
        open_group_count=samples.open_count,
        max_open_group_count=samples.open_limit,
        fresh_count=samples.books.count(RolloutPlace.FRESH),
        leased_count=samples.books.count(RolloutPlace.LEASED),
        trained_count=samples.books.count(RolloutPlace.TRAINED),
        replay_count=samples.replay.sample_count,
        drops=samples.books.drops,
        staleness_counts=window.staleness_counts,
        wait_fraction=window.wait_fraction,
        mean_reward=window.mean_reward,
        tokens_per_s=window.tokens_per_s,
        metrics=policy.metrics,
        window=window.span,
        buffer_group_count=len(samples.buffer),
        buffer_nbytes=samples.buffer.nbytes,
        replay_nbytes=samples.replay.nbytes,
        leased_batch_count=len(policy.lease_table.leases),
        filtered_group_count=samples.completion.filtered_in_a_row,
    )


class Run:
    """One run, from its first member to its last."""

    # The rollout that `refusal` found to be of use, and its sender. An attribute of the instance
    # until the next event alone: a run that is replayed was not asked.
    _useful: tuple[ev.RolloutArrived, LiveRaas] | None = None

    def __init__(self, settings: RunSettings, *, start_time: datetime) -> None:
        self._components = Components(settings, start_time=start_time)

    def apply(self, event: ev.Event, now: datetime, *, goes_on: bool = False) -> Decision:
        """Decide what comes of an event.

        Args:
            event: What happens.
            now: When.
            goes_on: Whether another event follows at once that came together with this one: what
                comes of both is decided with that one.

        Raises:
            AstraflowError: SESSION_ENDED, ROLE_NOT_ALLOWED for a sender who may not; as the event's
                docstring says. Nothing has changed then.
        """
        run = self._components
        changes_nothing = type(event) is ev.MemberKeptAlive and run.membership.is_there(
            event.member_id, now
        )
        kind, asked = REQUESTS[type(event)], cast("Any", event)
        useful = self._useful
        if useful is not None:
            del self._useful
        try:
            if useful is not None and event is useful[0]:
                answer = take_rollout(run, useful[1], useful[0], now, is_useful=True)
            elif kind.sender is None:
                answer = kind.handle(run, event, now)
            else:
                of_role = (
                    run.sessions.raas if kind.sender is MemberRole.RAAS else run.sessions.trainer
                )
                answer = kind.handle(run, of_role(asked.member_id), event, now)
        except AstraflowError:
            run.effects.take()
            raise
        if not (goes_on or changes_nothing):
            self._advance(now)
        return Decision(answer=answer, effects=run.effects.take())

    def _advance(self, now: datetime) -> None:
        run = self._components
        if run.faults.first is not None:
            run.lifecycle.fail(run.faults.first)
        for info in run.pacing.advance(now):
            run.evaluation.note_version(info.policy_id, info.version, now)
        if len(run.policies) > 1:
            for policy in run.pacing.take_lost():
                run.intake.recall(policy, now)
        if len(run.loading.served) < len(run.policies):
            run.loading.advance(now)
        if run.evaluation.active:
            run.evaluation.advance(now)
        run.batching.advance(now)
        # New training work waits the few milliseconds until evaluations have learned their
        # prompts, so that the versions to be measured are pinned before it moves the pool on.
        is_reading = not all(work.is_offered for work in run.evaluation.active.values())
        if not is_reading and run.training.advance(now):
            run.batching.advance(now)
        if run.saving.asked:
            run.saving.advance(now)
        run.ending.advance(now)
        run.balance.advance(now)
        if run.payloads.known:
            run.payloads.advance()

    def refusal(self, event: ev.RolloutArrived) -> Refusal | None:
        """Return what would be said to a rollout that is of no use; None: apply it.

        Applied as the next event it is not looked at again.

        Raises:
            AstraflowError: SESSION_ENDED.
        """
        member = self._components.sessions.raas(event.member_id)
        intake = self._components.intake
        refusal = intake.refusal(event) or intake.refusal_of_name(event.rollout)
        if refusal is None:
            self._useful = event, member
        return refusal

    @property
    def next_deadline(self) -> datetime | None:
        """When to apply Ticked; None: nothing is due. Read it again after every event."""
        run = self._components
        due = (
            run.sessions.next_end,
            run.tasks.next_deadline,
            run.evaluation.next_deadline if run.evaluation.active else None,
            run.ending.next_deadline,
            run.pacing.next_deadline if len(run.policies) > 1 else None,
            run.loading.next_deadline if len(run.loading.served) < len(run.policies) else None,
        )
        return min((time for time in due if time is not None), default=None)

    @property
    def time(self) -> datetime | None:
        """Of the last event; None: there was none."""
        return self._components.balance.time

    @property
    def has_trainers(self) -> bool:
        """Whether the session of a trainer is open."""
        return bool(self._components.sessions.trainers)

    def status(self, now: datetime) -> RunStatus:
        run = self._components
        return RunStatus(
            run_id=run.settings.run_id,
            state=run.ending.run_state,
            policies=tuple(map(_policy_status, run.policies.values())),
            members=tuple(run.sessions.status(member, now) for member in run.sessions),
            dead_letter_count=run.dead_letters.count,
            epochs=dict(run.prompts.epochs),
            failure=run.lifecycle.failure,
            failures=run.failures.report(),
            start_time=run.lifecycle.start_time,
            server_time=now,
        )

    def accounts(self) -> tuple[LedgerAccount, ...]:
        return tuple(
            policy.samples.books.account() for policy in self._components.policies.values()
        )

    def explain(self, policy_id: PolicyId, now: datetime) -> tuple[WaitReason, ...]:
        """Return what a policy's trainer waits for, link by link; empty: nothing.

        Raises:
            AstraflowError: POLICY_UNKNOWN.
        """
        policy = find_policy(self._components.policies, policy_id)
        return explain(self._components, policy, now)

    def scale_advice(self, now: datetime, window: timedelta | None = None) -> ScaleAdvice:
        """Return how large the pool should be; window None: that of the settings."""
        return self._components.balance.advice(now, window)

    def versions(
        self, policy_id: PolicyId, caller: MemberId | None = None
    ) -> tuple[VersionInfo, ...]:
        """Return what can be pulled, oldest first, with sources, best first for the caller.

        Raises:
            AstraflowError: POLICY_UNKNOWN.
        """
        listed = self.listed_versions(policy_id)
        return tuple(
            version_with_sources(self._components.sessions, info, caller) for info in listed
        )

    def listed_versions(self, policy_id: PolicyId) -> tuple[VersionInfo, ...]:
        """Return what can be pulled, oldest first, without the sources that the run adds.

        Raises:
            AstraflowError: POLICY_UNKNOWN.
        """
        return find_policy(self._components.policies, policy_id).versions.listed

    def next_version(self, policy_id: PolicyId) -> int:
        """Return what the next publication of a policy must be numbered.

        Raises:
            AstraflowError: POLICY_UNKNOWN.
        """
        return find_policy(self._components.policies, policy_id).versions.next_version

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
    ) -> tuple[SourceInfo, ...]:
        """Return who has a version, best first for the caller.

        Raises:
            AstraflowError: POLICY_UNKNOWN, VERSION_UNKNOWN, VERSION_EVICTED.
        """
        info = find_policy(self._components.policies, policy_id).versions.get(version)
        return sources_of(self._components.sessions, info, caller)

    @property
    def drawn_counts(self) -> Mapping[str, int]:
        """Training prompts that were offered so far: where each data set stands."""
        return self._components.prompts.drawn_counts

    def saved(self, checkpoint_id: str) -> SavedRun | None:
        """Return a checkpoint of the run that was asked for; None: some trainer has yet to save.

        Raises:
            AstraflowError: NOT_READY when a trainer is missing, or another checkpoint came between.
        """
        return self._components.saving.find(checkpoint_id)

    @property
    def payload_names(self) -> Set[str]:
        """Objects of the payload store that accepted rollouts name and nobody released."""
        return self._components.payloads.known

    @property
    def open_task_ids(self) -> frozenset[TaskId]:
        """Tasks whose end is still to come."""
        return frozenset(self._components.tasks.assignments)

    def suites(self) -> tuple[EvalSuiteInfo, ...]:
        return tuple(suite.suite for suite in self._components.settings.suites)

    def eval_run(self, eval_run_id: EvalRunId) -> EvalRun:
        """Return where an evaluation stands.

        Raises:
            AstraflowError: EVAL_UNKNOWN.
        """
        return self._components.evaluation.view(eval_run_id)

    def rollouts(self) -> Sequence[RolloutRecord]:
        """Return the rollouts that can be listed, newest first."""
        return self._components.records.newest_first()

    def dead_letters(self) -> Sequence[DeadLetter]:
        """Return the prompts given up, newest first."""
        return list(self._components.dead_letters)[::-1]
