"""The parts of a run, put together."""

from dataclasses import dataclass
from datetime import datetime

from astraflow.core.balance import Balance
from astraflow.core.batching import Batching
from astraflow.core.ending import RunEnding
from astraflow.core.eval_schedule import EvalSchedule
from astraflow.core.evaluation import Evaluation
from astraflow.core.intake import Intake
from astraflow.core.joining import Joining
from astraflow.core.loading import Loading
from astraflow.core.membership import Membership
from astraflow.core.outbound import TaskSender
from astraflow.core.pacing import PolicyPacing
from astraflow.core.saving import Saving
from astraflow.core.settings import RunSettings
from astraflow.core.state import State
from astraflow.core.training import Training


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Components:
    """Who works on the state of a run.

    Attributes:
        state: What they share.
        training: Decides what is asked of the pool for training.
        evaluation: Decides what is asked for evaluations.
        schedule: Begins evaluations by versions.
        pacing: Keeps policies within their distance.
        loading: Watches that versions are loaded.
        saving: Makes checkpoints of the whole run.
        batching: Gives batches to trainers.
        balance: Measures the pool against the trainers.
        intake: Takes what comes of tasks.
        membership: Keeps sessions and ends them.
        joining: Begins sessions.
        ending: Sees the run to its end.
    """

    state: State
    training: Training
    evaluation: Evaluation
    schedule: EvalSchedule
    pacing: PolicyPacing
    loading: Loading
    saving: Saving
    batching: Batching
    balance: Balance
    intake: Intake
    membership: Membership
    joining: Joining
    ending: RunEnding


def assemble(settings: RunSettings, *, start_time: datetime) -> Components:
    """Return the parts of a run that begins."""
    state = State(settings, start_time=start_time)
    outbound = TaskSender(state)
    training, evaluation = Training(state, outbound), Evaluation(state, outbound)
    schedule = EvalSchedule(state, evaluation)
    saving = Saving(state, training.prompts)
    batching = Batching(state, training, saving)
    intake = Intake(state, outbound, training=training, evaluation=evaluation)
    membership = Membership(state, intake=intake, batching=batching)
    return Components(
        state=state,
        training=training,
        evaluation=evaluation,
        schedule=schedule,
        pacing=PolicyPacing(state, schedule),
        loading=Loading(state),
        saving=saving,
        batching=batching,
        balance=Balance(state, training),
        intake=intake,
        membership=membership,
        joining=Joining(state, training=training, batching=batching, membership=membership),
        ending=RunEnding(
            state, training=training, batching=batching, evaluation=evaluation, schedule=schedule
        ),
    )
