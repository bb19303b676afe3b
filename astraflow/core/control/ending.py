"""Ending: the data ends policy by policy, then come the last evaluations, then everybody leaves.

Nobody has to leave in a hurry: a trainer is sent the end of its data once its last version is
live wherever it is wanted, and the hub closes last. A run whose pool cannot load the first weights
of a policy fails.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from astraflow.core.batches import EndCause
from astraflow.core.effects import CloseHub, Effects, RunStateChanged, SendDirective
from astraflow.core.errors import AstraflowError, Failure, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.lifecycle import RunLifecycle
from astraflow.core.members import Directive, DirectiveKind
from astraflow.core.policy.state import PolicyState
from astraflow.core.pool.sessions import Sessions
from astraflow.core.settings import RunSettings
from astraflow.core.status import RunState, StopMode
from astraflow.core.work.batching import Batching
from astraflow.core.work.evaluation import Evaluation
from astraflow.core.work.training import Training


@dataclass(slots=True, kw_only=True, eq=False)
class Loading:
    """Watches for policies that nobody can serve.

    Once some RaaS has served a policy, later versions that fail are the nodes' own matter: they
    go on with what they have, and try again.

    Attributes:
        served: Policies that were live somewhere; once all are there is nothing to watch for.
    """

    settings: RunSettings
    policies: Mapping[PolicyId, PolicyState]
    sessions: Sessions
    lifecycle: RunLifecycle
    _failing_since: datetime | None = field(init=False, default=None)
    served: set[str] = field(init=False, default_factory=set[str])

    @property
    def next_deadline(self) -> datetime | None:
        """When the run fails, unless somebody loads the weights."""
        if self._failing_since is None or self.lifecycle.is_final:
            return None
        return self._failing_since + self.settings.first_version_grace

    def advance(self, now: datetime) -> None:
        """Fail the run when all of the pool has failed to load a policy for too long."""
        failing = [p for p in self.policies.values() if self._is_failing(p)]
        if not failing:
            self._failing_since = None
            return
        self._failing_since = self._failing_since or now
        if now - self._failing_since >= self.settings.first_version_grace:
            self._fail(failing[0])

    def _is_failing(self, policy: PolicyState) -> bool:
        """Whether somebody tried to load a policy, nobody has it, and everybody failed."""
        if policy.policy_id in self.served or policy.end is not None:
            return False
        sessions = self.sessions
        if sessions.version_index.is_live(policy.policy_id):
            self.served.add(policy.policy_id)
            return False
        pool = [member for member in sessions.pool.values() if policy.policy_id in member.policies]
        shown = policy.versions.shown_version
        failed = [member.failed.get(policy.policy_id) for member in pool]
        return bool(failed) and all(each is not None and each >= shown for each in failed)

    def _fail(self, policy: PolicyState) -> None:
        cause = policy.load_failure
        self.lifecycle.fail(
            Failure(
                reason=cause.reason if cause else Reason.VERSION_NOT_SERVED,
                message=f"no RaaS could load version {policy.versions.shown_version} of "
                f"{policy.policy_id}: {cause.message if cause else 'they did not say why'}",
                metadata=cause.metadata if cause else {},
            )
        )


@dataclass(slots=True, kw_only=True, eq=False)
class RunEnding:
    """Sees a run to its end."""

    settings: RunSettings
    policies: Mapping[PolicyId, PolicyState]
    sessions: Sessions
    training: Training
    batching: Batching
    evaluation: Evaluation
    lifecycle: RunLifecycle
    effects: Effects
    _released: set[PolicyId] = field(init=False, default_factory=set[PolicyId])

    @property
    def run_state(self) -> RunState:
        return self._state(is_through=self.training.is_through)

    def _state(self, *, is_through: bool) -> RunState:
        flow = self.lifecycle
        if flow.failure is not None:
            return RunState.FAILED
        if flow.is_final:
            return RunState.DONE
        live = [policy for policy in self.policies.values() if policy.end is None]
        if flow.stop is not None or not live:
            return RunState.STOPPING
        if flow.is_paused:
            return RunState.PAUSED
        if is_through:
            return RunState.SOURCE_EXHAUSTED
        trainers = [self.sessions.trainers.get(policy.policy_id) for policy in live]
        is_waiting = None in trainers or not self.sessions.pool
        return RunState.WAITING if is_waiting else RunState.RUNNING

    @property
    def next_deadline(self) -> datetime | None:
        """When the run acts by itself for its end."""
        flow = self.lifecycle
        if flow.final_time is not None:
            return None if flow.is_closed else flow.final_time + self.settings.leave_grace
        waiting = [
            policy.end_time + self.settings.last_version_grace
            for policy in self.policies.values()
            if policy.end_time is not None and policy.policy_id not in self._released
        ]
        return min(waiting + ([flow.stop_time] if flow.stop_time else []), default=None)

    def stop(self, mode: StopMode, grace: timedelta | None, now: datetime) -> None:
        """End the run; a cancel shortens a drain, a drain does not lengthen a cancel."""
        flow = self.lifecycle
        if flow.is_final or flow.stop is StopMode.CANCEL:
            return
        flow.order_stop(mode, cancel_time=None if grace is None else now + grace)
        self.evaluation.cancel_all(now)

    def begin_again(self, now: datetime) -> None:
        """Give members of a run that is over their whole grace; close a hub that was closing."""
        flow = self.lifecycle
        if flow.is_closed:
            self.effects.do(CloseHub())
        elif flow.is_final:
            flow.finish(now)

    def reopen(self, step_counts: Mapping[str, int]) -> None:
        """Have a run that was stopped, failed or reached its end go on.

        Args:
            step_counts: Batches of each policy from now on; 0: until the data ends.

        Raises:
            AstraflowError: RUN_ENDED when it is over and nothing is left to do.
        """
        limits = {
            policy.policy_id: step_counts.get(policy.policy_id) or None
            for policy in self.policies.values()
        }
        counts = {each.policy_id: each.progress.consumed_count for each in self.policies.values()}
        has_steps = any(limit is None or limit > counts[name] for name, limit in limits.items())
        if not has_steps or self.training.prompts.is_through:
            if not self.lifecycle.is_final:
                # What its end still needs, such as an evaluation, is done.
                return
            why = "no prompt is left" if has_steps else "every policy has done its steps"
            raise AstraflowError(Reason.RUN_ENDED, f"the run is over: {why}")
        self.lifecycle.reopen()
        for policy in self.policies.values():
            policy.progress.step_count = limits[policy.policy_id]
            is_through = self.training.is_through
            if policy.end is not None and self._cause(policy, is_through=is_through) is None:
                policy.end = policy.end_time = None
                self._released.discard(policy.policy_id)
        self.evaluation.reopen()

    def advance(self, now: datetime) -> None:
        flow, policies = self.lifecycle, self.policies.values()
        is_through = self.training.is_through
        if not flow.is_final:
            if flow.stop_time is not None and flow.stop_time <= now:
                flow.order_stop(StopMode.CANCEL)
            for policy in policies:
                cause = policy.end or self._cause(policy, is_through=is_through)
                if policy.end is None and cause is not None:
                    self.training.retire(policy)
                    policy.retire(cause, now)
        ended = [policy for policy in policies if policy.end is not None]
        if ended:
            self._release_trainers(ended, now)
        if not flow.is_final and len(ended) == len(policies):
            self.evaluation.has_pool = True
            self._finish_when_done(now)
        if flow.final_time is not None and not flow.is_closed:
            is_late = flow.final_time + self.settings.leave_grace <= now
            if is_late or not len(self.sessions):
                flow.is_closed = True
                self.effects.do(CloseHub())
        state = self._state(is_through=is_through)
        if state is not flow.shown:
            flow.shown = state
            self.effects.do(RunStateChanged(state=state))

    def _cause(self, policy: PolicyState, *, is_through: bool) -> EndCause | None:
        """Say why a policy's data is at its end, or None."""
        flow = self.lifecycle
        if flow.failure is not None or flow.stop is StopMode.CANCEL:
            return EndCause.STOPPED
        progress = policy.progress
        if progress.step_count is not None and progress.consumed_count >= progress.step_count:
            return EndCause.STEP_LIMIT
        is_trained = policy.policy_id in self.training.policy_ids
        if not is_trained or (is_through and not policy.samples.open_count):
            return EndCause.STOPPED if flow.stop else EndCause.SOURCE_EXHAUSTED
        return None

    def _release_trainers(self, ended: Sequence[PolicyState], now: datetime) -> None:
        if self.lifecycle.failure is not None:
            return
        for policy in ended:
            if policy.policy_id not in self._released and self._may_leave(policy, now):
                self._released.add(policy.policy_id)
            member = self.sessions.trainers.get(policy.policy_id)
            if policy.policy_id in self._released and member is not None and policy.end is not None:
                self.batching.end_data(policy, member, policy.end)

    def _may_leave(self, policy: PolicyState, now: datetime) -> bool:
        """Whether nobody needs the trainer: its last version is live where it is served."""
        grace = self.settings.last_version_grace
        is_late = policy.end_time is not None and policy.end_time + grace <= now
        if is_late or self.lifecycle.stop is StopMode.CANCEL:
            return True
        newest = policy.versions.newest
        if newest is None:
            return True
        return newest.step >= policy.progress.step and all(
            member.live.get(policy.policy_id) == newest.version
            for member in self.sessions.pool.values()
            if policy.policy_id in member.policies and not member.is_draining
        )

    def _finish_when_done(self, now: datetime) -> None:
        flow = self.lifecycle
        if flow.failure is not None or flow.stop is StopMode.CANCEL:
            self.evaluation.cancel_all(now)
        elif len(self._released) < len(self.policies):
            return
        else:
            self.evaluation.note_end(now)
        if self.evaluation.active:
            return
        flow.finish(now)
        message = "the run is over" if flow.failure is None else flow.failure.message
        order = Directive(kind=DirectiveKind.STOP, message=message)
        for member in self.sessions:
            self.effects.do(SendDirective(member_id=member.member_id, directive=order))
