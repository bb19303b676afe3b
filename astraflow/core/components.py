"""Components: what a run is made of, and who calls whom."""

from collections.abc import Mapping
from datetime import datetime

from astraflow.core.algorithms.finding import Faults
from astraflow.core.control.balance import Balance
from astraflow.core.control.ending import Loading, RunEnding
from astraflow.core.control.joining import Joining
from astraflow.core.control.membership import Membership
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


class Components:
    """What a run is made of; each part is given whom it calls, and they were made before it.

    Attributes:
        settings: Of the run.
        lifecycle: How it goes on.
        effects: Of the event in progress.
        faults: Of data algorithms.
        failures: Of rollouts.
        dead_letters: Prompts given up.
        records: Accepted rollouts that can be listed.
        sessions: Who is here.
        policies: By id, in the order of the recipe.
        tasks: What is open.
        prompts: That wait to be asked for.
        pacing: Keeps policies within their distance.
        training: Decides what is asked of the pool for training.
        evaluation: Decides what is asked for evaluations.
        saving: Makes checkpoints of the whole run.
        batching: Gives batches to trainers.
        intake: Takes what comes of tasks.
        payloads: Knows which objects of the payload store are of use.
        membership: Keeps sessions and ends them.
        joining: Begins sessions.
        loading: Watches that versions are loaded.
        balance: Measures the pool against the trainers.
        ending: Sees the run to its end.
    """

    def __init__(self, settings: RunSettings, *, start_time: datetime) -> None:
        """Make a run that begins.

        Raises:
            AstraflowError: CODE_UNKNOWN, INVALID_FIELD as `finding.make`.
        """
        ids, measured = IdGenerator(settings.run_id), Measured()
        self.settings = settings
        self.lifecycle = lifecycle = RunLifecycle(start_time=start_time)
        self.effects = effects = Effects()
        self.faults = faults = Faults()
        self.failures = failures = FailureLog()
        self.dead_letters = dead_letters = DeadLetters()
        self.records = records = RolloutRecords(
            max_count=settings.kept_rollout_count, max_nbytes=settings.kept_rollout_nbytes
        )
        self.sessions = sessions = Sessions(
            ttl=settings.session_ttl, unit=settings.rollouts.unit, has_evals=bool(settings.suites)
        )
        policies = {
            policy.policy_id: PolicyState(policy, settings, faults=faults)
            for policy in settings.policies
        }
        self.policies: Mapping[PolicyId, PolicyState] = policies
        self.tasks = tasks = TaskTable(settings, ids=ids, effects=effects)
        self.prompts = prompts = PromptQueue(
            settings,
            faults=faults,
            dead_letters=dead_letters,
            lifecycle=lifecycle,
            effects=effects,
        )
        self.pacing = pacing = PolicyPacing(
            settings,
            policies=policies,
            sessions=sessions,
            tasks=tasks,
            lifecycle=lifecycle,
            effects=effects,
        )
        self.training = training = Training(
            settings,
            prompts=prompts,
            policies=policies,
            sessions=sessions,
            scheduler=Scheduler(settings, policies=policies, sessions=sessions, measured=measured),
            tasks=tasks,
            pacing=pacing,
            failures=failures,
            dead_letters=dead_letters,
            ids=ids,
            lifecycle=lifecycle,
        )
        self.evaluation = evaluation = Evaluation(
            settings,
            policies=policies,
            sessions=sessions,
            tasks=tasks,
            ids=ids,
            lifecycle=lifecycle,
            effects=effects,
        )
        self.saving = saving = Saving(
            policies, sessions=sessions, prompts=prompts, lifecycle=lifecycle, effects=effects
        )
        self.batching = batching = Batching(
            policies,
            sessions=sessions,
            prompts=prompts,
            training=training,
            saving=saving,
            pacing=pacing,
            ids=ids,
            lifecycle=lifecycle,
            effects=effects,
        )
        self.intake = intake = Intake(
            settings,
            policies=policies,
            sessions=sessions,
            tasks=tasks,
            training=training,
            evaluation=evaluation,
            pacing=pacing,
            measured=measured,
            records=records,
            failures=failures,
            lifecycle=lifecycle,
            effects=effects,
        )
        self.payloads = PayloadLedger(policies, tasks=tasks, lifecycle=lifecycle, effects=effects)
        self.membership = membership = Membership(
            sessions,
            policies=policies,
            intake=intake,
            batching=batching,
            lifecycle=lifecycle,
            effects=effects,
        )
        self.joining = Joining(
            settings,
            policies=policies,
            sessions=sessions,
            records=records,
            prompts=prompts,
            training=training,
            batching=batching,
            membership=membership,
            ids=ids,
            lifecycle=lifecycle,
            effects=effects,
        )
        self.loading = Loading(settings, policies=policies, sessions=sessions, lifecycle=lifecycle)
        self.balance = Balance(
            settings,
            policies=policies,
            sessions=sessions,
            measured=measured,
            training=training,
            pacing=pacing,
            lifecycle=lifecycle,
        )
        self.ending = RunEnding(
            settings,
            policies=policies,
            sessions=sessions,
            training=training,
            batching=batching,
            evaluation=evaluation,
            lifecycle=lifecycle,
            effects=effects,
        )
