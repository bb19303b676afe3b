"""Nodes of the pool: what each has, and has room for."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import partial

from astraflow.core.ids import MemberId, PolicyId, TaskId
from astraflow.core.members import Directive, JoinPool, RaasLoad
from astraflow.core.tasks import RolloutTask, TaskCancellation, TaskCredit, TaskPurpose
from astraflow.rpc.outbox import Outbox


@dataclass(slots=True, kw_only=True, eq=False)
class Node:
    """One node.

    Attributes:
        member_id: Of its session.
        join: What it said of itself.
        outbox: What its StreamTasks has to send.
        credit: What it takes at once.
        tasks: That it has.
        live: Version that it samples with, by policy.
        load: That it reported last.
        seen_s: When it was heard last, by the loop's clock.
        incarnation: Which start of its process this is.
    """

    member_id: MemberId
    join: JoinPool
    seen_s: float
    outbox: Outbox[RolloutTask | TaskCancellation | Directive] = field(
        default_factory=Outbox[RolloutTask | TaskCancellation | Directive]
    )
    credit: TaskCredit = field(default_factory=partial(TaskCredit, max_outstanding=0))
    tasks: dict[TaskId, RolloutTask] = field(default_factory=dict[TaskId, RolloutTask])
    live: dict[PolicyId, int] = field(default_factory=dict[PolicyId, int])
    load: RaasLoad = field(default_factory=RaasLoad)
    incarnation: int = 1

    @property
    def policy_ids(self) -> frozenset[PolicyId]:
        """That it has engines for."""
        return frozenset(each.policy_id for each in self.join.policies)

    @property
    def sample_count(self) -> int:
        """Samples that it has."""
        return sum(len(task.sample_indexes) for task in self.tasks.values())

    def lacks(self, policy_id: PolicyId, version: int) -> bool:
        """Whether it has an engine for a policy that samples with an older version, or none."""
        return policy_id in self.policy_ids and self.live.get(policy_id, -1) < version

    def resume(self, held: Collection[TaskId]) -> None:
        """Go on over another stream: what it does not have is sent again."""
        self.outbox.clear()
        for task_id, task in self.tasks.items():
            if task_id not in held:
                self.outbox.put(task)

    def room(self, purpose: TaskPurpose) -> int:
        """Return how many more samples it takes."""
        credit = self.credit
        if not credit.max_outstanding:
            return 0
        used = self.sample_count
        measured = sum(
            len(task.sample_indexes)
            for task in self.tasks.values()
            if task.purpose is TaskPurpose.EVAL
        )
        if purpose is TaskPurpose.TRAIN:
            return credit.max_outstanding - used + min(measured, credit.max_eval_extra)
        share = credit.max_eval_outstanding
        share = credit.max_outstanding if share is None else share
        return credit.max_eval_extra + min(credit.max_outstanding - used, share - measured)


def roomiest(
    nodes: Iterable[Node], purpose: TaskPurpose, policy_ids: frozenset[PolicyId]
) -> Node | None:
    """Return the node with most room that has these policies live; None: nobody has room."""
    fitting = [node for node in nodes if policy_ids <= node.live.keys() and node.room(purpose) > 0]
    return max(fitting, key=lambda node: node.room(purpose), default=None)
