"""Components: what a run is made of, and who calls whom."""

from collections.abc import Mapping
from datetime import datetime
from inspect import signature
from typing import TypeVar

from astraflow.core.algorithms.finding import Faults
from astraflow.core.control.balance import Balance
from astraflow.core.control.ending import Loading, RunEnding
from astraflow.core.control.membership import Joining, Membership
from astraflow.core.effects import Effects
from astraflow.core.ids import IdGenerator, PolicyId
from astraflow.core.lifecycle import RunLifecycle
from astraflow.core.policy.state import PolicyState
from astraflow.core.pool.capacity import Measured
from astraflow.core.pool.sessions import Sessions
from astraflow.core.samples import RolloutRecords
from astraflow.core.settings import RunSettings
from astraflow.core.work.batching import Batching
from astraflow.core.work.evaluation import Evaluation
from astraflow.core.work.failures import DeadLetters, FailureLog
from astraflow.core.work.intake import Intake
from astraflow.core.work.pacing import PolicyPacing
from astraflow.core.work.payloads import PayloadLedger
from astraflow.core.work.prompt_queue import PromptQueue
from astraflow.core.work.saving import Saving
from astraflow.core.work.scheduler import Scheduler
from astraflow.core.work.task_table import TaskTable
from astraflow.core.work.training import Training

T = TypeVar("T")


class Components:
    """What a run is made of; each part is given whom it calls, and they were made before it."""

    def __init__(self, settings: RunSettings, *, start_time: datetime) -> None:
        self.settings = settings
        self.ids = IdGenerator(settings.run_id)
        self.measured = Measured()
        self.lifecycle = RunLifecycle(start_time=start_time)
        self.effects = Effects()
        self.faults = Faults()
        self.failures = FailureLog()
        self.dead_letters = DeadLetters()
        self.records = RolloutRecords(
            max_count=settings.kept_rollout_count, max_nbytes=settings.kept_rollout_nbytes
        )
        self.sessions = Sessions(
            ttl=settings.session_ttl, unit=settings.rollouts.unit, has_evals=bool(settings.suites)
        )
        self.policies: Mapping[PolicyId, PolicyState] = {
            policy.policy_id: PolicyState(policy, settings, faults=self.faults)
            for policy in settings.policies
        }
        self.tasks = self._made(TaskTable)
        self.prompts = self._made(PromptQueue)
        self.pacing = self._made(PolicyPacing)
        self.scheduler = self._made(Scheduler)
        self.training = self._made(Training)
        self.evaluation = self._made(Evaluation)
        self.saving = self._made(Saving)
        self.batching = self._made(Batching)
        self.intake = self._made(Intake)
        self.payloads = self._made(PayloadLedger)
        self.membership = self._made(Membership)
        self.joining = self._made(Joining)
        self.loading = self._made(Loading)
        self.balance = self._made(Balance)
        self.ending = self._made(RunEnding)

    def _made(self, kind: type[T]) -> T:
        """Make a component of those made before it, as its parameters name them."""
        return kind(**{name: getattr(self, name) for name in signature(kind).parameters})
