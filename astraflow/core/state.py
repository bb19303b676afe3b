"""What the parts of a run share: its settings, who is here, what is open, what is to be done."""

from collections import deque
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from astraflow.core.algorithms.finding import Faults
from astraflow.core.barrier import Barrier
from astraflow.core.capacity import Measured
from astraflow.core.effects import Effect
from astraflow.core.errors import AstraflowError, Failure, Reason
from astraflow.core.failures import DeadLetters, FailureLog
from astraflow.core.groups import Assignment, SampleGroup
from astraflow.core.ids import GroupId, IdGenerator, PolicyId, TaskId
from astraflow.core.policies import PolicyState
from astraflow.core.samples import RolloutRecords
from astraflow.core.sessions import Sessions
from astraflow.core.settings import RunSettings
from astraflow.core.status import RunState, StopMode


@dataclass(slots=True, kw_only=True, eq=False)
class RunLifecycle:
    """How the run goes on.

    Attributes:
        is_paused: By an operator.
        stop: How it was stopped; None: it was not.
        stop_time: When a drain becomes a cancel.
        failure: Why it failed.
        final_time: When it was over.
        is_closed: Whether the hub was asked to exit.
        epochs: Passes completed, by data set.
    """

    is_paused: bool = False
    stop: StopMode | None = None
    stop_time: datetime | None = None
    failure: Failure | None = None
    final_time: datetime | None = None
    is_closed: bool = False
    epochs: dict[str, int] = field(default_factory=dict[str, int])
    shown: RunState = RunState.WAITING

    def fail(self, failure: Failure | None) -> None:
        """Note why the run cannot go on; the first reason counts."""
        if not self.is_final:
            self.failure = self.failure or failure

    @property
    def is_final(self) -> bool:
        """Whether nothing more will happen."""
        return self.final_time is not None


class State:
    """The shared state of one run.

    Attributes:
        barrier: Between its policies.
        measured: How fast the pool is, and how long rollouts are.
        effects: Of the event in progress.
        groups: That have an unanswered sample.
        assignments: Tasks at a RaaS.
        deadlines: Of the tasks, in the order of their issue, which is that of time.
        dead_letters: Prompts given up.
        faults: Of data algorithms.
        failures: Of rollouts.
    """

    def __init__(self, settings: RunSettings, *, start_time: datetime) -> None:
        self.settings = settings
        self.start_time = start_time
        self.ids = IdGenerator(settings.run_id)
        self.lifecycle = RunLifecycle()
        self.sessions = Sessions(
            ttl=settings.session_ttl,
            unit=settings.rollouts.unit,
            has_evals=bool(settings.suites),
        )
        self.faults = Faults()
        self.policies = {
            policy.policy_id: PolicyState(policy, settings, faults=self.faults)
            for policy in settings.policies
        }
        self.barrier = Barrier(settings.relation)
        self.measured = Measured()
        self.records = RolloutRecords(
            max_count=settings.kept_rollout_count, max_nbytes=settings.kept_rollout_nbytes
        )
        self.groups: dict[GroupId, SampleGroup] = {}
        self.assignments: dict[TaskId, Assignment] = {}
        self.deadlines = deque[tuple[datetime, TaskId]]()
        self.dead_letters = DeadLetters()
        self.failures = FailureLog()
        self.effects: list[Effect] = []

    @property
    def task_ttl(self) -> timedelta:
        """How long a task may be out.

        A rollout may take its timeout; a task may wait about as long for a place or a version.
        """
        return 2 * self.settings.rollouts.timeout + timedelta(seconds=30)

    def policy(self, policy_id: PolicyId) -> PolicyState:
        """Return a policy.

        Raises:
            AstraflowError: POLICY_UNKNOWN.
        """
        policy = self.policies.get(policy_id)
        if policy is None:
            known = ", ".join(self.policies)
            raise AstraflowError(
                Reason.POLICY_UNKNOWN, f"the run has no policy '{policy_id}', only {known}"
            )
        return policy

    def do(self, effect: Effect) -> None:
        """Ask for an effect."""
        self.effects.append(effect)

    def take_effects(self) -> tuple[Effect, ...]:
        """Return the effects of the event, and begin anew."""
        effects, self.effects = tuple(self.effects), []
        return effects

    def newest_versions(self, policy_ids: tuple[PolicyId, ...]) -> dict[PolicyId, int] | None:
        """Return the newest version of each policy that the pool may see; None: one has none."""
        newest = {p: self.policies[p].versions.shown_version for p in policy_ids}
        return None if min(newest.values()) < 0 else newest
