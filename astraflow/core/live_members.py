"""Live members: one session each, with what it holds and what is known of it."""

from dataclasses import dataclass, field
from datetime import datetime

from astraflow.core.capacity_index import CapacityIndex
from astraflow.core.groups import Assignment
from astraflow.core.ids import MemberId, PolicyId, TaskId
from astraflow.core.members import MemberRole, RaasLoad, Resources, ServedPolicy, TrainerLoad
from astraflow.core.speed import Speed
from astraflow.core.versions import WeightEndpoint


@dataclass(slots=True, kw_only=True, eq=False)
class LiveMember:
    """One live session.

    Attributes:
        drain_time: When the grace of a drain ends; None: no limit.
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
        assignments: Tasks that it holds.
        speed: As measured.
        number: Rises by one per session that is opened.
        rooms: Where its credit for training is entered; None: nowhere.
        eval_rooms: The same for evaluations.
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
    capacity_index: "CapacityIndex[LiveRaas] | None" = None
    eval_capacity_index: "CapacityIndex[LiveRaas] | None" = None

    @property
    def serves_any(self) -> bool:
        """Whether any of its engines holds a version of the run."""
        return bool(self.live)

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
        """Whether it has an engine for each."""
        return all(policy_id in self.policies for policy_id in policy_ids)

    def is_ready(self, policy_ids: tuple[PolicyId, ...]) -> bool:
        """Whether each of these engines holds a version of the run."""
        return all(policy_id in self.live for policy_id in policy_ids)

    def go_live(self, policy_id: PolicyId, version: int) -> None:
        """Note the version that an engine samples with from now on."""
        self.live[policy_id] = version
        self._enter()

    def give_credit(
        self, max_outstanding: int, max_eval_outstanding: int | None = None, *, extra: int = 0
    ) -> None:
        """Bound its work from now on; see `TaskCredit`."""
        self.max_outstanding = max_outstanding
        self.max_eval_outstanding = max_eval_outstanding
        self.max_eval_extra = extra if max_outstanding else 0
        self._enter()

    def leave_indexes(self) -> None:
        """Let nobody find its credit any more."""
        for rooms in (self.capacity_index, self.eval_capacity_index):
            if rooms is not None:
                rooms.forget(self.member_id)
        self.capacity_index = self.eval_capacity_index = None

    def measure(self, *, seconds: float, token_count: int) -> None:
        """Count an accepted rollout in its speed; its credit was given back before."""
        self.speed.note(seconds=seconds, token_count=token_count, outstanding=self.outstanding + 1)
        self._enter()

    def hold(self, assignment: Assignment) -> None:
        """Count a task against the credit."""
        self.assignments[assignment.task_id] = assignment
        self._count(assignment, len(assignment.open_indexes))

    def answer(self, assignment: Assignment, index: int) -> None:
        """Give back the credit of one sample; one that was answered before changes nothing."""
        if index in assignment.open_indexes:
            assignment.open_indexes.discard(index)
            self._count(assignment, -1)

    def release(self, assignment: Assignment) -> None:
        """Give back the credit of what is left of a task, and forget it."""
        del self.assignments[assignment.task_id]
        self._count(assignment, -len(assignment.open_indexes))

    def _count(self, assignment: Assignment, count: int) -> None:
        self.outstanding += count
        if assignment.is_eval:
            self.eval_outstanding += count
        self._enter()

    def _enter(self) -> None:
        if self.capacity_index is not None:
            self.capacity_index.note(self)
        if self.eval_capacity_index is not None:
            self.eval_capacity_index.note(self)


@dataclass(slots=True, kw_only=True, eq=False)
class LiveTrainer(LiveMember):
    """A trainer of one policy."""

    policy_id: PolicyId
    weight_endpoints: tuple[WeightEndpoint, ...] = ()
