"""The barrier between policies: how far one may be ahead of another, and for how long it waits.

A policy's next version may be made when it is at most `max_lead` versions newer than those of
all others that still train. Lockstep is a distance of one, and new versions are shown to the pool
together. Whoever has no trainer is waited for up to the timeout, and then given up until it is
back: a slow trainer is waited for as long as it lives. Independent policies give it up at once.

Example:
    Lockstep, both at version 4. A makes 5 and has to wait: 6 would be two ahead of B. B's trainer
    dies at 10:00:00, A arrives at 10:00:20. With a timeout of 60 s B is given up at 10:01:00.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from astraflow.core.ids import PolicyId
from astraflow.core.settings import RelationKind, VersionRelation


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStanding:
    """Where one policy stands that still trains.

    Attributes:
        made_version: Newest version that its acknowledged steps make.
        next_version: What its next batch would make.
        published_version: Newest version that can be pulled; -1: none.
        has_trainer: Whether a trainer of it has a session.
        departure_time: When its last trainer was last seen; None: it has one, or never had.
    """

    policy_id: PolicyId
    made_version: int
    next_version: int
    published_version: int
    has_trainer: bool = True
    departure_time: datetime | None = None


class Barrier:
    """Holds policies back, and gives up those that nobody trains any more."""

    def __init__(self, relation: VersionRelation) -> None:
        self._relation = relation
        self._waited_since: dict[PolicyId, datetime] = {}
        self._given_up: set[PolicyId] = set()

    @property
    def is_lockstep(self) -> bool:
        return self._relation.kind is RelationKind.LOCKSTEP

    @property
    def given_up(self) -> frozenset[PolicyId]:
        """Policies that nobody waits for any more."""
        return frozenset(self._given_up)

    def blocker(
        self, policy: PolicyStanding, others: Iterable[PolicyStanding]
    ) -> PolicyStanding | None:
        """Return who is furthest behind of those that a policy has to wait for; None: nobody."""
        behind = self._behind(policy, others)
        return min(behind, key=lambda other: other.made_version, default=None)

    def shown_version(self, policy: PolicyStanding, others: Iterable[PolicyStanding]) -> int:
        """Return the newest version of a policy that the pool may see."""
        waits_for = self._partners(policy, others) if self.is_lockstep else ()
        return min([policy.published_version, *(other.published_version for other in waits_for)])

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
        self._given_up = {p for p in self._given_up if p in known and not known[p].has_trainer}
        self._note_waits(known, missed, now)
        late = tuple(p for p in self._waited_since if self._deadline(p) <= now)
        self._given_up.update(late)
        for policy_id in late:
            del self._waited_since[policy_id]
        return late

    @property
    def next_deadline(self) -> datetime | None:
        """When the next policy is given up, unless its trainer comes back."""
        return min(map(self._deadline, self._waited_since), default=None)

    def deadline_of(self, policy_id: PolicyId) -> datetime | None:
        """Return when a policy is given up; None: nobody waits, or its trainer lives."""
        return self._deadline(policy_id) if policy_id in self._waited_since else None

    def _partners(
        self, policy: PolicyStanding, others: Iterable[PolicyStanding]
    ) -> list[PolicyStanding]:
        left_out = self._given_up | {policy.policy_id}
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

    def _note_waits(
        self, known: Mapping[PolicyId, PolicyStanding], missed: Collection[PolicyId], now: datetime
    ) -> None:
        before = self._waited_since
        behind = {o.policy_id for p in known.values() for o in self._behind(p, known.values())}
        self._waited_since = {
            other.policy_id: other.departure_time or before.get(other.policy_id, now)
            for other in known.values()
            if other.policy_id not in self._given_up and not other.has_trainer
            if other.policy_id in behind or other.policy_id in missed
        }

    def _deadline(self, policy_id: PolicyId) -> datetime:
        is_free = self._relation.max_lead is None
        return self._waited_since[policy_id] + (timedelta() if is_free else self._relation.timeout)
