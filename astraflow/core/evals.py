"""Evaluations: pinned versions measured on a suite of data sets."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from astraflow.core.errors import Failure
from astraflow.core.ids import EvalRunId, PolicyId, WorkflowId


class EvalState(StrEnum):
    """Where an evaluation stands."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether nothing more will happen."""
        return self in (EvalState.SUCCEEDED, EvalState.FAILED, EvalState.CANCELLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """The outcome on one data set; see `evals/v1/eval.proto`.

    A missing rollout counts nowhere but in `missing_count`. `data_set` is empty in the
    mean over data sets.
    """

    data_set: str
    prompt_count: int
    repeats: int
    avg_at_k: float
    pass_at_k: Mapping[int, float] = field(default_factory=dict[int, float])
    mean_reward: float
    missing_count: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRun:
    """One evaluation of pinned versions on one suite; see `evals/v1/eval.proto`.

    `failure` of one that is not final is what it waits for, and will fail of in a while.
    """

    eval_run_id: EvalRunId
    suite: str
    versions: Mapping[PolicyId, int]
    state: EvalState
    rollout_count: int
    scored_count: int = 0
    missing_count: int = 0
    results: tuple[EvalResult, ...] = ()
    overall: EvalResult | None = None
    failure: Failure | None = None
    create_time: datetime
    finish_time: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalDataSet:
    """One part of a suite; a rollout is correct when its reward is at least `correct_reward`."""

    data_set: str
    workflow_id: WorkflowId
    prompt_count: int
    repeats: int
    correct_reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSuiteInfo:
    """A named set of data sets from the recipe, and the policies whose versions it pins."""

    suite: str
    data_sets: tuple[EvalDataSet, ...]
    policy_ids: tuple[PolicyId, ...]
