"""Pacing: the barrier between policies, when their versions are shown, who gets groups.

A version that was announced and pulled by nobody is lost with its trainer until that is back. Work
that is for several policies and asks for it would wait as long, whoever else trains on it.

Example:
    Solver and verifier train on the same groups. The verifier's trainer announces version 5 and
    dies; node A samples with version 4 and has no other source. A task that asks for 5 or newer
    waits. Once the verifier is given up, it is withdrawn, and issued again for 4 or newer.
"""

from datetime import datetime, timedelta

from astraflow.core.barrier import OnTimeout, PolicyStanding
from astraflow.core.effects import AnnounceVersion, SendPublishOrder
from astraflow.core.errors import AstraflowError, Failure, Reason
from astraflow.core.evaluation import EvalSchedule
from astraflow.core.groups import Assignment
from astraflow.core.ids import PolicyId
from astraflow.core.policies import PolicyState
from astraflow.core.sources import sources_of, version_with_sources
from astraflow.core.state import State
from astraflow.core.versions import PublishAnswer, VersionInfo


def newest_available(state: State, policy: PolicyState) -> int:
    """Return the newest version that all of the pool sample with or can pull; -1: none."""
    for info in reversed(policy.versions.listed):
        if sources_of(state.sessions, info):
            return info.version
    return min(
        (member.live.get(policy.policy_id, -1) for member in state.sessions.pool), default=-1
    )


def is_missed(state: State, policy: PolicyState) -> bool:
    """Whether work that others train on waits for a version that nobody can have."""
    if policy.versions.newest is None or state.sessions.trainer_of(policy.policy_id) is not None:
        return False
    if not _has_partner(state, policy):
        return False
    available = newest_available(state, policy)
    return policy.open.min_version(is_open=True) > available or any(
        waits_in_vain(state, policy, assignment, available)
        for assignment in state.assignments.values()
    )


def waits_in_vain(
    state: State, policy: PolicyState, assignment: Assignment, available: int
) -> bool:
    """Whether a training task asks for a version that its holder cannot have."""
    bounds = assignment.task.versions.get(policy.policy_id)
    if bounds is None or bounds.min is None or assignment.is_eval or assignment.is_withdrawn:
        return False
    live = state.sessions.raas(assignment.member_id).live.get(policy.policy_id, -1)
    return bounds.min > max(live, available)


def _has_partner(state: State, policy: PolicyState) -> bool:
    others = (other for other in state.policies.values() if other is not policy)
    return any(
        other.end is None and state.sessions.trainer_of(other.policy_id) is not None
        for other in others
    )


class PolicyPacing:
    """Keeps policies within the distance that the recipe allows."""

    def __init__(self, state: State, schedule: EvalSchedule) -> None:
        self._state = state
        self._schedule = schedule
        self._relation = state.settings.relation
        self._available: dict[PolicyId, int] = {}

    @property
    def next_deadline(self) -> datetime | None:
        """When the next policy without a trainer is given up."""
        return None if self._state.lifecycle.is_final else self._state.barrier.next_deadline

    def advance(self, now: datetime) -> tuple[PolicyId, ...]:
        """Give up who was waited for long enough; show the versions that may be seen.

        Returns:
            Policies given up of which less can be had than before: work may wait in vain.
        """
        if len(self._state.policies) > 1 and not self._state.lifecycle.is_final:
            missed = [p.policy_id for p in self._state.policies.values() if self._is_missed(p)]
            late = self._state.barrier.advance(standings(self._state), now, missed=missed)
            if late and not self._is_free and self._relation.on_timeout is OnTimeout.STOP:
                self._fail(late)
        for policy in self._state.policies.values():
            self._order(policy)
        self._show(now)
        return self._note_available()

    def announce_again(self, info: VersionInfo) -> None:
        """Announce a version that gained patches, if it was shown."""
        if info.version <= self._state.policies[info.policy_id].versions.shown_version:
            self._announce(info)

    def request(self, policy: PolicyState) -> PublishAnswer:
        """Ask the trainer of a policy for a version, once, unless the newest has all steps.

        Raises:
            AstraflowError: NOT_READY without a trainer.
        """
        trainer = self._state.sessions.trainer_of(policy.policy_id)
        if trainer is None:
            raise AstraflowError(
                Reason.NOT_READY,
                f"{policy.policy_id} has no trainer now; ask again once it has one",
                retryable=True,
            )
        newest = policy.versions.newest
        if policy.progress.has_more and policy.end is None and not policy.progress.is_requested:
            policy.progress.is_requested = True
            self._order(policy)
        return PublishAnswer(
            newest_version=None if newest is None else newest.version,
            is_pending=policy.progress.is_requested,
        )

    def _order(self, policy: PolicyState) -> None:
        """Tell the trainer which version was asked for, once it may come."""
        trainer = self._state.sessions.trainer_of(policy.policy_id)
        if trainer is not None and policy.progress.can_order:
            policy.progress.is_ordered = True
            self._state.do(SendPublishOrder(member_id=trainer.member_id))

    @property
    def _is_free(self) -> bool:
        return self._relation.max_lead is None

    def _is_missed(self, policy: PolicyState) -> bool:
        return policy.end is None and is_missed(self._state, policy)

    def _note_available(self) -> tuple[PolicyId, ...]:
        before, state = self._available, self._state
        given_up = state.barrier.given_up
        self._available = {p: newest_available(state, state.policies[p]) for p in sorted(given_up)}
        return tuple(
            p for p, newest in self._available.items() if p not in before or newest < before[p]
        )

    def _show(self, now: datetime) -> None:
        shown: list[VersionInfo] = []
        for policy in self._state.policies.values():
            if policy.versions.shown_version < policy.versions.newest_version:
                shown += policy.versions.show(self._limit(policy))
        for info in shown:
            self._announce(info)
        for info in () if self._state.lifecycle.is_final else shown:
            self._schedule.note_version(info.policy_id, info.version, now)

    def _limit(self, policy: PolicyState) -> int:
        """Return the newest version that the pool may see; all of a policy whose data ended."""
        if policy.end is not None:
            return policy.versions.newest_version
        standing = _standing(self._state, policy)
        return self._state.barrier.shown_version(standing, standings(self._state))

    def _announce(self, info: VersionInfo) -> None:
        self._state.do(AnnounceVersion(info=version_with_sources(self._state.sessions, info)))

    def _fail(self, late: tuple[PolicyId, ...]) -> None:
        flow, timeout = self._state.lifecycle, self._relation.timeout
        flow.failure = flow.failure or Failure(
            reason=Reason.NOT_READY,
            message=f"{', '.join(late)} had no trainer for {_seconds(timeout)} and the relation of "
            f"the policies is {self._relation.kind} with on_timeout stop; start its trainer again, "
            "or choose on_timeout: go_on",
        )


def blocker_of(state: State, policy: PolicyState) -> PolicyStanding | None:
    """Return whom a policy has to wait for before its next batch; None: nobody."""
    if state.settings.relation.max_lead is None:
        return None
    return state.barrier.blocker(_standing(state, policy), standings(state))


def standings(state: State) -> tuple[PolicyStanding, ...]:
    """Return where the policies stand that still train."""
    policies = state.policies.values()
    return tuple(_standing(state, policy) for policy in policies if policy.end is None)


def _standing(state: State, policy: PolicyState) -> PolicyStanding:
    return PolicyStanding(
        policy_id=policy.policy_id,
        made_version=policy.progress.made_version,
        next_version=policy.progress.next_version,
        published_version=policy.versions.newest_version,
        has_trainer=state.sessions.trainer_of(policy.policy_id) is not None,
        departure_time=policy.departure_time,
    )


def _seconds(span: timedelta) -> str:
    return f"{span.total_seconds():g} s"


def live_policies(state: State) -> list[PolicyState]:
    """Return the policies of the training workflow whose data goes on."""
    policies = (state.policies[policy_id] for policy_id in state.settings.workflow.policy_ids)
    return [policy for policy in policies if policy.end is None]


def target_policies(state: State) -> list[PolicyState]:
    """Return the policies that the next group is for; none: it has to wait.

    Groups are for all policies as long as they go on at about one pace. One that is full holds
    the others back until they starve, and not for longer when it is far behind.
    """
    live = live_policies(state)
    roomy = [policy for policy in live if policy.open.has_slot]
    full = [policy for policy in live if not policy.open.has_slot]
    starving = [policy for policy in roomy if policy.open.is_starving]
    if full and not all(_may_miss(state, blocked, short) for blocked in full for short in starving):
        return []
    return roomy if not full else starving


def full_policy(state: State) -> PolicyState | None:
    """Return the policy whose open groups keep new ones back; None: none does."""
    return next((policy for policy in live_policies(state) if not policy.open.has_slot), None)


def _may_miss(state: State, full: PolicyState, starving: PolicyState) -> bool:
    """Whether a policy that is full may miss groups that another one needs."""
    is_left = state.sessions.trainer_of(full.policy_id) is None
    if is_left or blocker_of(state, full) is not None:
        return True
    # Batches that may be open: whoever is so far ahead has nothing left that both train on.
    most = (full.settings.max_staleness + 1) * (full.settings.steps_per_version or 1)
    return 1 < most <= starving.progress.consumed_count - full.progress.consumed_count
