"""Live members: what each may be given, what it holds, and which versions it has."""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from astraflow.core.groups import Assignment
from astraflow.core.ids import MemberId, PolicyId, TaskId
from astraflow.core.members import (
    JoinPool,
    MemberRole,
    RaasLoad,
    Resources,
    ServedPolicy,
    TrainerLoad,
)
from astraflow.core.pool.capacity import Speed
from astraflow.core.tasks import TaskPurpose
from astraflow.core.versions import VersionReport, VersionState, WeightEndpoint

# Evicted versions of a policy that are remembered.
_EVICTED_COUNT = 8


@dataclass(slots=True, kw_only=True, eq=False)
class LiveMember:
    """One live session.

    Attributes:
        is_draining: Whether it is given nothing new.
        drain_time: When the grace of that ends; None: no limit.
        accepted_count: Rollouts that were taken of it.
        reissued_count: Tasks of which some was issued again, for its session ended.
    """

    member_id: MemberId
    name: str
    role: MemberRole
    incarnation: int
    region: str
    resources: Resources
    join_time: datetime
    keep_alive_time: datetime
    load: RaasLoad | TrainerLoad | None = None
    is_draining: bool = False
    drain_time: datetime | None = None
    accepted_count: int = 0
    reissued_count: int = 0

    def keep_alive(self, now: datetime, load: RaasLoad | TrainerLoad | None = None) -> None:
        """Note that it is there, and how busy it is; None: it does not say."""
        self.keep_alive_time = now
        self.load = load or self.load


@dataclass(slots=True, kw_only=True, eq=False)
class LiveRaas(LiveMember):
    """A RaaS.

    Attributes:
        policies: What it has engines for.
        live: Version that each engine samples with.
        failed: Newest version that each engine failed to load.
        evicted: Versions that its relay no longer has, the last ones.
        refused: Pinned versions that it said it cannot serve.
        pinned: Versions of which evaluation tasks were sent to it while they were live.
        max_outstanding: Credit, in samples.
        max_eval_outstanding: Of these, for evaluations; None: all.
        max_eval_extra: Samples of evaluations beyond its credit; 0 while that is 0.
        number: Rises by one per session that is opened.
        capacity_index: Where its credit for training is entered; None: nowhere.
        eval_capacity_index: The same for evaluations.
        version_index: Where the versions of its engines are entered; None: nowhere.
    """

    policies: dict[PolicyId, ServedPolicy]
    relay_endpoint: str = ""
    live: dict[PolicyId, int] = field(default_factory=dict[PolicyId, int])
    failed: dict[PolicyId, int] = field(default_factory=dict[PolicyId, int])
    evicted: dict[PolicyId, tuple[int, ...]] = field(
        default_factory=dict[PolicyId, tuple[int, ...]]
    )
    refused: set[tuple[PolicyId, int]] = field(default_factory=set[tuple[PolicyId, int]])
    pinned: set[tuple[PolicyId, int]] = field(default_factory=set[tuple[PolicyId, int]])
    max_outstanding: int = 0
    max_eval_outstanding: int | None = None
    max_eval_extra: int = 0
    outstanding: int = 0
    eval_outstanding: int = 0
    assignments: dict[TaskId, Assignment] = field(default_factory=dict[TaskId, Assignment])
    speed: Speed = field(default_factory=Speed)
    number: int = 0
    capacity_index: "CapacityIndex | None" = None
    eval_capacity_index: "CapacityIndex | None" = None
    version_index: "VersionIndex | None" = None

    @property
    def free_count(self) -> int:
        """Samples of training that it can take: what is beyond its credit takes none of it."""
        beyond = min(self.eval_outstanding, self.max_eval_extra)
        return max(0, self.max_outstanding - self.outstanding + beyond)

    @property
    def eval_free_count(self) -> int:
        """Samples of evaluations that it can take."""
        return max(0, self.max_outstanding + self.max_eval_extra - self.outstanding)

    def serves(self, policy_ids: tuple[PolicyId, ...]) -> bool:
        return all(policy_id in self.policies for policy_id in policy_ids)

    def is_ready(self, policy_ids: tuple[PolicyId, ...]) -> bool:
        """Whether each of these engines holds a version of the run."""
        return all(policy_id in self.live for policy_id in policy_ids)

    def go_live(self, policy_id: PolicyId, version: int) -> None:
        """Note the version that an engine samples with from now on."""
        self._leave_versions()
        self.live[policy_id] = version
        self._enter_versions()
        self.enter()

    def set_failed(self, policy_id: PolicyId, version: int | None) -> None:
        """Note the version that an engine failed to load; None: it has loaded one since."""
        if version == self.failed.get(policy_id):
            return
        self._leave_versions()
        if version is None:
            del self.failed[policy_id]
        else:
            self.failed[policy_id] = version
        self._enter_versions()

    def describe(self, request: JoinPool) -> None:
        """Note what it says of itself: what it has engines for, and where it relays."""
        self.name = request.name
        if self.speed.capacity != request.capacity:
            self.speed.capacity = request.capacity
            self.enter()
        self._leave_versions()
        self.policies = {served.policy_id: served for served in request.policies}
        self.relay_endpoint = request.relay_endpoint
        self._enter_versions()

    def note_version(self, report: VersionReport) -> None:
        policy_id, version = report.policy_id, report.version
        evicted = [each for each in self.evicted.get(policy_id, ()) if each != version]
        match report.state:
            case VersionState.LIVE:
                self.go_live(policy_id, version)
                self.set_failed(policy_id, None)
            case VersionState.FAILED:
                self.set_failed(policy_id, version)
            case VersionState.EVICTED:
                evicted.append(version)
            case VersionState.PULLING | VersionState.STAGED:
                pass
        self.evicted[policy_id] = tuple(evicted[-_EVICTED_COUNT:])

    def refuse(self, versions: Set[tuple[PolicyId, int]]) -> None:
        self.refused |= versions
        self.pinned -= versions

    def give_credit(
        self, max_outstanding: int, max_eval_outstanding: int | None = None, *, extra: int = 0
    ) -> None:
        """Bound its work from now on; see `TaskCredit`."""
        self.max_outstanding = max_outstanding
        self.max_eval_outstanding = max_eval_outstanding
        self.max_eval_extra = extra if max_outstanding else 0
        self.enter()

    def leave_indexes(self) -> None:
        """Let nobody find its credit any more."""
        for index in (self.capacity_index, self.eval_capacity_index):
            if index is not None:
                index.forget(self.member_id)
        self._leave_versions()
        self.capacity_index = self.eval_capacity_index = self.version_index = None

    def hold(self, assignment: Assignment) -> None:
        """Count a task against the credit."""
        self.assignments[assignment.task.task_id] = assignment
        self.count(assignment, len(assignment.open_indexes))

    def release(self, assignment: Assignment) -> None:
        """Give back the credit of what is left of a task, and forget it."""
        del self.assignments[assignment.task.task_id]
        if assignment.open_indexes:
            self.count(assignment, -len(assignment.open_indexes))

    def count(self, assignment: Assignment, count: int) -> None:
        """Count samples of a task against the credit; below 0: give it back."""
        self.outstanding += count
        if assignment.group.purpose is TaskPurpose.EVAL:
            self.eval_outstanding += count
        self.enter()

    def enter(self) -> None:
        """Have its credit and its pace looked at again, when somebody looks."""
        for index in (self.capacity_index, self.eval_capacity_index):
            if index is not None:
                index.changed[self.member_id] = self

    def _enter_versions(self) -> None:
        if self.version_index is not None:
            self.version_index.enter(self)

    def _leave_versions(self) -> None:
        if self.version_index is not None:
            self.version_index.leave(self)


_NEW: Final = 0

_MEASURED: Final = 1

_SERVES_NOTHING: Final = 2

# Free credit, and what is known of who has it.
_Bucket = tuple[int, int]

_Place = tuple[float, int, int]


class CapacityIndex:
    """Members by the samples that they could take now, each bucket of them by pace.

    A change of one member takes a search in its bucket, when somebody looks.

    Attributes:
        changed: To be entered anew when somebody looks.
        unit: Samples that are mostly placed at once. The pace of a member is the seconds per token
            that these would take with all that it holds; 0: not measured.
    """

    unit: int = 1

    def __init__(self, *, unit: int, is_eval: bool = False) -> None:
        self.unit = unit
        self._is_eval = is_eval
        self._places: dict[MemberId, tuple[_Bucket, _Place]] = {}
        self._buckets: dict[_Bucket, list[_Place]] = {}
        self._members: dict[int, LiveRaas] = {}
        self.changed: dict[MemberId, LiveRaas] = {}

    def _enter_changed(self) -> None:
        for member in self.changed.values():
            free = member.eval_free_count if self._is_eval else member.free_count
            pace_s = member.speed.pace_s(outstanding=member.outstanding, count=self.unit)
            known = _MEASURED if pace_s else _NEW
            bucket = free, known if member.live else _SERVES_NOTHING
            place = pace_s, member.outstanding, member.number
            if self._places.get(member.member_id) != (bucket, place):
                self._take_out(member.member_id)
                self._places[member.member_id] = bucket, place
                self._members[member.number] = member
                insort(self._buckets.setdefault(bucket, []), place)
        self.changed.clear()

    def forget(self, member_id: MemberId) -> None:
        """Take a member out; one that is not here changes nothing."""
        self.changed.pop(member_id, None)
        self._take_out(member_id)

    def _take_out(self, member_id: MemberId) -> None:
        found = self._places.pop(member_id, None)
        if found is None:
            return
        bucket, place = found
        places = self._buckets[bucket]
        del places[bisect_left(places, place)]
        del self._members[place[2]]
        if not places:
            del self._buckets[bucket]

    def buckets(self, count: int) -> Iterator[tuple[int, Iterator[tuple[float, LiveRaas]]]]:
        """Yield who has credit for so many samples, at least one, and serves anything.

        First the credit, then those who have it, with their paces. Those with the same credit are
        together, those that were not measured yet by themselves. Of each bucket who has the least
        pace comes first, then who holds least, and who joined first.
        """
        if self.changed:
            self._enter_changed()
        for (free, kind), places in self._buckets.items():
            if free >= max(1, count) and kind != _SERVES_NOTHING:
                yield free, ((pace_s, self._members[number]) for pace_s, _, number in places)

    def has_credit(self, count: int) -> bool:
        """Whether anybody has credit for so many samples, be it one that serves nothing yet."""
        if self.changed:
            self._enter_changed()
        return any(free >= max(1, count) for free, _ in self._buckets)


class VersionIndex:
    """The pool by the version that engines sample with; relays and others, in order of joining."""

    def __init__(self) -> None:
        # By policy, live version and kind, then by region, then by the version that failed.
        self._members: dict[
            tuple[PolicyId, int | None, bool], dict[str, dict[int | None, list[LiveRaas]]]
        ] = {}

    def enter(self, member: LiveRaas) -> None:
        for policy_id in member.policies | member.live:
            regions = self._members.setdefault(_key(member, policy_id), {})
            groups = regions.setdefault(member.region, {})
            insort(groups.setdefault(member.failed.get(policy_id), []), member, key=_number)

    def leave(self, member: LiveRaas) -> None:
        """Take a RaaS out that stands as it was entered."""
        for policy_id in member.policies | member.live:
            key, failed = _key(member, policy_id), member.failed.get(policy_id)
            regions = self._members[key]
            groups = regions[member.region]
            group = groups[failed]
            del group[place_of(member, group)]
            if not group:
                del groups[failed]
            if not groups:
                del regions[member.region]
            if not regions:
                del self._members[key]

    def is_live(self, policy_id: PolicyId) -> bool:
        """Whether any engine holds a version of a policy."""
        return any(
            policy == policy_id and version is not None for policy, version, _ in self._members
        )

    def regions(self, policy_id: PolicyId, version: int | None) -> Collection[str]:
        """Return the regions with relays that have a version live."""
        return self._members.get((policy_id, version, True), {}).keys()

    def group(
        self,
        policy_id: PolicyId,
        version: int | None,
        region: str,
        *,
        is_relay: bool,
        but_failed: int | None = None,
    ) -> Sequence[LiveRaas]:
        """Return who has a version of a policy live, in the order in which they joined.

        Args:
            policy_id: Of the version.
            version: None: no version is live there.
            region: Of the members.
            is_relay: Relays, or all others.
            but_failed: Who failed to load this version last is left out; None: nobody.
        """
        regions = self._members.get((policy_id, version, is_relay), _NOWHERE)
        groups = [
            group
            for failed, group in regions.get(region, _NOBODY).items()
            if but_failed is None or failed != but_failed
        ]
        if len(groups) == 1:
            return groups[0]
        return sorted((member for group in groups for member in group), key=_number)


_NOBODY: Mapping[int | None, list[LiveRaas]] = {}

_NOWHERE: Mapping[str, Mapping[int | None, list[LiveRaas]]] = {}


def place_of(member: LiveRaas, group: Sequence[LiveRaas]) -> int:
    """Return how many of a group, in the order in which they joined, joined before a RaaS."""
    return bisect_left(group, member.number, key=_number)


def _key(member: LiveRaas, policy_id: PolicyId) -> tuple[PolicyId, int | None, bool]:
    return policy_id, member.live.get(policy_id), bool(member.relay_endpoint)


def _number(member: LiveRaas) -> int:
    return member.number


@dataclass(slots=True, kw_only=True, eq=False)
class LiveTrainer(LiveMember):
    """A trainer of one policy."""

    policy_id: PolicyId
    weight_endpoints: tuple[WeightEndpoint, ...] = ()
