"""Pacing: the barrier between policies, when their versions are shown, who gets groups.

A policy's next version may be made when it is at most `max_lead` versions newer than those of
all others that still train. Lockstep is a distance of one, and new versions are shown to the pool
together. Whoever has no trainer is waited for up to the timeout, and then given up until it is
back: a slow trainer is waited for as long as it lives. Independent policies give it up at once.

Example:
    Lockstep, both at version 4. A makes 5 and has to wait: 6 would be two ahead of B. B's trainer
    dies at 10:00:00, A arrives at 10:00:20. With a timeout of 60 s B is given up at 10:01:00.

A version that was announced and pulled by nobody is lost with its trainer until that is back. Work
that is for several policies and asks for it would wait as long, whoever else trains on it.

Example:
    Solver and verifier train on the same groups. The verifier's trainer announces version 5 and
    dies; node A samples with version 4 and has no other source. A task that asks for 5 or newer
    waits. Once the verifier is given up, it is withdrawn, and issued again for 4 or newer.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from astraflow.core.effects import AnnounceVersion, Effects, SendPublishOrder
from astraflow.core.errors import AstraflowError, Failure, Reason
from astraflow.core.groups import Assignment
from astraflow.core.ids import PolicyId
from astraflow.core.lifecycle import RunLifecycle
from astraflow.core.policy.state import PolicyState
from astraflow.core.pool.sessions import Sessions
from astraflow.core.pool.sources import sources_of, version_with_sources
from astraflow.core.settings import OnTimeout, RelationKind, RunSettings, VersionRelation
from astraflow.core.versions import PublishAnswer, VersionInfo
from astraflow.core.work.task_table import TaskTable


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStanding:
    """Where one policy stands that still trains.

    Attributes:
        made_version: Newest version that its acknowledged steps make.
        next_version: What its next batch would make.
        published_version: Newest version that can be pulled; -1: none.
        coming_version: Newest version that comes without a batch that is not leased yet.
        departure_time: When its last trainer was last seen; None: it has one, or never had.
    """

    policy_id: PolicyId
    made_version: int
    next_version: int
    published_version: int
    coming_version: int = -1
    has_trainer: bool = True
    departure_time: datetime | None = None


class Barrier:
    """Holds policies back, and gives up those that nobody trains any more.

    Attributes:
        given_up: Policies that nobody waits for any more.
        waited_since: Policies that others wait for, until they are given up.
    """

    def __init__(self, relation: VersionRelation) -> None:
        self._relation = relation
        self.waited_since: dict[PolicyId, datetime] = {}
        self.given_up: set[PolicyId] = set()

    def blocker(
        self, policy: PolicyStanding, others: Iterable[PolicyStanding]
    ) -> PolicyStanding | None:
        """Return who is furthest behind of those that a policy has to wait for; None: nobody."""
        behind = self._behind(policy, others)
        return min(behind, key=lambda other: other.made_version, default=None)

    def shown_version(self, policy: PolicyStanding, others: Iterable[PolicyStanding]) -> int:
        """Return the newest version of a policy that the pool may see."""
        return min(each.published_version for each in self._shown_with(policy, others))

    def coming_version(self, policy: PolicyStanding, others: Iterable[PolicyStanding]) -> int:
        """Return the newest version that the pool sees without a batch that is not leased yet."""
        return min(each.coming_version for each in self._shown_with(policy, others))

    def advance(
        self,
        standings: Iterable[PolicyStanding],
        now: datetime,
        *,
        missed: Collection[PolicyId] = (),
    ) -> tuple[PolicyId, ...]:
        """Note who waits for whom; return who is given up now.

        Args:
            standings: Of all policies that still train.
            now: The time.
            missed: Without a trainer, while work of others waits for a version of them.
        """
        known = {standing.policy_id: standing for standing in standings}
        self.given_up = {p for p in self.given_up if p in known and not known[p].has_trainer}
        before = self.waited_since
        behind = {o.policy_id for p in known.values() for o in self._behind(p, known.values())}
        self.waited_since = {
            other.policy_id: other.departure_time or before.get(other.policy_id, now)
            for other in known.values()
            if other.policy_id not in self.given_up and not other.has_trainer
            if other.policy_id in behind or other.policy_id in missed
        }
        late = tuple(p for p in self.waited_since if self._deadline(p) <= now)
        self.given_up.update(late)
        for policy_id in late:
            del self.waited_since[policy_id]
        return late

    @property
    def next_deadline(self) -> datetime | None:
        """When the next policy is given up, unless its trainer comes back."""
        return min(map(self._deadline, self.waited_since), default=None)

    def deadline_of(self, policy_id: PolicyId) -> datetime | None:
        """Return when a policy is given up; None: nobody waits, or its trainer lives."""
        return self._deadline(policy_id) if policy_id in self.waited_since else None

    def _shown_with(
        self, policy: PolicyStanding, others: Iterable[PolicyStanding]
    ) -> list[PolicyStanding]:
        """Return a policy and those whose versions are shown together with its own."""
        is_lockstep = self._relation.kind is RelationKind.LOCKSTEP
        return [policy, *(self._partners(policy, others) if is_lockstep else ())]

    def _partners(
        self, policy: PolicyStanding, others: Iterable[PolicyStanding]
    ) -> list[PolicyStanding]:
        left_out = self.given_up | {policy.policy_id}
        return [other for other in others if other.policy_id not in left_out]

    def _behind(
        self, policy: PolicyStanding, others: Iterable[PolicyStanding]
    ) -> list[PolicyStanding]:
        most = self._relation.max_lead
        if most is None:
            return []
        return [
            other
            for other in self._partners(policy, others)
            if policy.next_version - other.made_version > most
        ]

    def _deadline(self, policy_id: PolicyId) -> datetime:
        is_free = self._relation.max_lead is None
        return self.waited_since[policy_id] + (timedelta() if is_free else self._relation.timeout)


@dataclass(slots=True, kw_only=True, eq=False)
class PolicyPacing:
    """Keeps policies within the distance that the recipe allows."""

    settings: RunSettings
    policies: Mapping[PolicyId, PolicyState]
    sessions: Sessions
    tasks: TaskTable
    lifecycle: RunLifecycle
    effects: Effects
    _trained: list[PolicyState] = field(init=False)
    _barrier: Barrier = field(init=False)
    _is_free: bool = field(init=False)
    _available: dict[PolicyId, int] = field(init=False, default_factory=dict[PolicyId, int])

    def __post_init__(self) -> None:
        self._trained = [self.policies[each] for each in self.settings.workflow.policy_ids]
        self._barrier = Barrier(self.settings.relation)
        self._is_free = self.settings.relation.max_lead is None

    @property
    def next_deadline(self) -> datetime | None:
        """When the next policy without a trainer is given up."""
        barrier = self._barrier
        is_idle = not barrier.waited_since or self.lifecycle.is_final
        return None if is_idle else barrier.next_deadline

    def deadline_of(self, policy_id: PolicyId) -> datetime | None:
        """Return when a policy is given up; None: nobody waits, or its trainer lives."""
        return self._barrier.deadline_of(policy_id)

    @property
    def live_policies(self) -> list[PolicyState]:
        """The policies of the training workflow whose data goes on."""
        return [policy for policy in self._trained if policy.end is None]

    @property
    def target_policies(self) -> list[PolicyState]:
        """The policies that the next group is for; none: it has to wait.

        Groups are for all policies as long as they go on at about one pace. One that is full holds
        the others back until they starve, and not for longer when it is far behind.
        """
        roomy: list[PolicyState] = []
        full: list[PolicyState] = []
        for policy in self._trained:
            if policy.end is None:
                (roomy if policy.samples.has_slot else full).append(policy)
        if not full:
            return roomy
        starving = [policy for policy in roomy if policy.samples.is_starving]
        may_miss = all(self._may_miss(each, short) for each in full for short in starving)
        return starving if may_miss else []

    def blocker_of(self, policy: PolicyState) -> PolicyStanding | None:
        """Return whom a policy has to wait for before its next batch; None: nobody."""
        if self._is_free:
            return None
        return self._barrier.blocker(self._standing(policy), self._standings())

    def newest_available(self, policy: PolicyState) -> int:
        """Return the newest version that all of the pool sample with or can pull; -1: none."""
        for info in reversed(policy.versions.listed):
            if sources_of(self.sessions, info):
                return info.version
        return min(
            (member.live.get(policy.policy_id, -1) for member in self.sessions.pool.values()),
            default=-1,
        )

    def min_version(self, policy: PolicyState, *, is_open: bool) -> int:
        """Return the oldest version to ask for; of a policy given up, one that can be had.

        The pool sees it without another batch, which may lack just what is asked for.
        """
        wanted = policy.samples.min_version(is_open=is_open)
        if policy.policy_id in self._barrier.given_up:
            return max(0, min(wanted, self.newest_available(policy)))
        coming = policy.progress.coming_version
        if not self._is_free:
            coming = self._barrier.coming_version(self._standing(policy), self._standings())
        return max(0, min(wanted, coming))

    def waits_in_vain(self, policy: PolicyState, assignment: Assignment, available: int) -> bool:
        """Whether a training task asks for a version that its holder cannot have."""
        bounds = assignment.task.versions.get(policy.policy_id)
        if bounds is None or bounds.min is None or assignment.is_eval or assignment.is_withdrawn:
            return False
        live = self.sessions.raas(assignment.member_id).live.get(policy.policy_id, -1)
        return bounds.min > max(live, available)

    def advance(self, now: datetime) -> list[VersionInfo]:
        """Give up who was waited for long enough; show the versions that may be seen.

        Returns:
            What is shown from now on.
        """
        is_alone = len(self.policies) == 1
        if not is_alone and not self.lifecycle.is_final:
            missed = [p.policy_id for p in self.policies.values() if self._is_missed(p)]
            late = self._barrier.advance(self._standings(), now, missed=missed)
            if late and not self._is_free and self.settings.relation.on_timeout is OnTimeout.STOP:
                self._fail(late)
        shown: list[VersionInfo] = []
        for policy in self.policies.values():
            if policy.progress.is_requested:
                self._order(policy)
            if policy.versions.shown_version + 1 < policy.versions.next_version:
                limit = policy.versions.newest_version
                if policy.end is None and not is_alone:
                    limit = self._barrier.shown_version(self._standing(policy), self._standings())
                shown += policy.versions.show(limit)
        for info in shown:
            self._announce(info)
        return shown

    def take_lost(self) -> Sequence[PolicyState]:
        """Return policies given up of which less can be had than before: work may wait in vain."""
        before = self._available
        if not before and not self._barrier.given_up:
            return ()
        self._available = {
            policy_id: self.newest_available(self.policies[policy_id])
            for policy_id in sorted(self._barrier.given_up)
        }
        return [
            self.policies[policy_id]
            for policy_id, newest in self._available.items()
            if policy_id not in before or newest < before[policy_id]
        ]

    def announce_again(self, info: VersionInfo) -> None:
        """Announce a version that gained patches, if it was shown."""
        if info.version <= self.policies[info.policy_id].versions.shown_version:
            self._announce(info)

    def request(self, policy: PolicyState) -> PublishAnswer:
        """Ask the trainer of a policy for a version, once, unless the newest has all steps."""
        trainer = self.sessions.trainers.get(policy.policy_id)
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
        trainer = self.sessions.trainers.get(policy.policy_id)
        if trainer is not None and policy.progress.can_order:
            policy.progress.is_ordered = True
            self.effects.do(SendPublishOrder(member_id=trainer.member_id))

    def _is_missed(self, policy: PolicyState) -> bool:
        """Whether work that others train on waits for a version that nobody can have."""
        if policy.end is not None or policy.versions.newest is None:
            return False
        others = [each for each in self.policies.values() if each.end is None]
        if self._has_trainer(policy) or not any(map(self._has_trainer, others)):
            return False
        available = self.newest_available(policy)
        return policy.samples.min_version(is_open=True) > available or any(
            self.waits_in_vain(policy, assignment, available)
            for assignment in self.tasks.assignments.values()
        )

    def _has_trainer(self, policy: PolicyState) -> bool:
        return self.sessions.trainers.get(policy.policy_id) is not None

    def _may_miss(self, full: PolicyState, starving: PolicyState) -> bool:
        """Whether a policy that is full may miss groups that another one needs."""
        if not self._has_trainer(full) or self.blocker_of(full) is not None:
            return True
        # Batches that may be open: whoever is so far ahead has nothing left that both train on.
        most = (full.settings.max_staleness + 1) * (full.settings.steps_per_version or 1)
        return 1 < most <= starving.progress.consumed_count - full.progress.consumed_count

    def _announce(self, info: VersionInfo) -> None:
        self.effects.do(AnnounceVersion(info=version_with_sources(self.sessions, info)))

    def _standings(self) -> list[PolicyStanding]:
        """Return where the policies stand that still train."""
        return [self._standing(policy) for policy in self.policies.values() if policy.end is None]

    def _standing(self, policy: PolicyState) -> PolicyStanding:
        return PolicyStanding(
            policy_id=policy.policy_id,
            made_version=policy.progress.made_version,
            next_version=policy.progress.next_version,
            published_version=policy.versions.newest_version,
            coming_version=policy.progress.coming_version,
            has_trainer=self._has_trainer(policy),
            departure_time=policy.departure_time,
        )

    def _fail(self, late: tuple[PolicyId, ...]) -> None:
        relation = self.settings.relation
        seconds = relation.timeout.total_seconds()
        self.lifecycle.fail(
            Failure(
                reason=Reason.NOT_READY,
                message=f"{', '.join(late)} had no trainer for {seconds:g} s and the relation of "
                f"the policies is {relation.kind} with on_timeout stop; start its trainer again, "
                "or choose on_timeout: go_on",
            )
        )
