"""What an operator sees: the run's state, its books, its checkpoints, what waits for what."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from math import inf, nan

from astraflow.core.errors import Failure, Reason
from astraflow.core.ids import BatchId, GroupId, MemberId, PolicyId, PromptId, RolloutId, RunId
from astraflow.core.members import MemberStatus
from astraflow.core.rollouts import Outcome, Rollout
from astraflow.core.tasks import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyCheckpoint:
    """One policy in a checkpoint.

    Attributes:
        step: Optimizer steps in it.
        version: Newest one then; None: none was published.
        fresh_group_count: Groups in its buffer when its trainer had saved.
    """

    policy_id: PolicyId
    step: int
    version: int | None
    fresh_group_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """A checkpoint of the run: every trainer has saved under its id.

    Attributes:
        checkpoint_id: Of all its parts.
        drawn_counts: Prompts read by then, by data set.
        save_time: When the last trainer had saved.
    """

    checkpoint_id: str
    policies: tuple[PolicyCheckpoint, ...]
    drawn_counts: Mapping[str, int]
    save_time: datetime


class RunState(StrEnum):
    """Where a run stands; DONE and FAILED are final."""

    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"
    SOURCE_EXHAUSTED = "source_exhausted"
    STOPPING = "stopping"
    DONE = "done"
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        return self in (RunState.DONE, RunState.FAILED)


class StopMode(StrEnum):
    """What becomes of open work when a run is stopped."""

    DRAIN = "drain"
    CANCEL = "cancel"


@dataclass(frozen=True, slots=True, kw_only=True)
class DropCount:
    """Rollouts dropped for one reason; `filter` names the plug-in of REASON_FILTERED."""

    reason: Reason
    filter: str = ""
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureCause:
    """What equal failures have in common.

    Attributes:
        cause: Such as "KeyError at my_workflows.py:22".
        last: The newest one, with the newest traceback that came.
    """

    cause: str
    count: int
    last: Failure
    first_time: datetime
    last_time: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    """How many rollouts fail, and why; see `control/v1/run.proto`."""

    finished_count: int = 0
    failed_count: int = 0
    recent_count: int = 0
    recent_failed_count: int = 0
    causes: tuple[FailureCause, ...] = ()

    @property
    def failed_share(self) -> float:
        """Of all, 0 to 1."""
        return self.failed_count / max(1, self.finished_count)

    @property
    def recent_share(self) -> float:
        """Of the last ones, 0 to 1."""
        return self.recent_failed_count / max(1, self.recent_count)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStatus:
    """One policy's column of the state; see `control/v1/run.proto`."""

    policy_id: PolicyId
    version: int | None
    step: int
    open_group_count: int
    max_open_group_count: int
    fresh_count: int
    leased_count: int
    trained_count: int
    replay_count: int = 0
    drops: tuple[DropCount, ...] = ()
    staleness_counts: Mapping[int, int] = field(default_factory=dict[int, int])
    wait_fraction: float = 0.0
    mean_reward: float | None = None
    tokens_per_s: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    window: timedelta = timedelta()
    buffer_group_count: int = 0
    buffer_nbytes: int = 0
    replay_nbytes: int = 0
    leased_batch_count: int = 0
    filtered_group_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The whole state in one answer; see `control/v1/run.proto`."""

    run_id: RunId
    state: RunState
    policies: tuple[PolicyStatus, ...]
    members: tuple[MemberStatus, ...]
    dead_letter_count: int = 0
    epochs: Mapping[str, int] = field(default_factory=dict[str, int])
    failure: Failure | None = None
    failures: FailureReport = field(default_factory=FailureReport)
    start_time: datetime
    server_time: datetime


class RolloutPlace(StrEnum):
    """Where a sample is for one policy; always exactly one."""

    IN_FLIGHT = "in_flight"
    WAITING = "waiting"
    FRESH = "fresh"
    LEASED = "leased"
    TRAINED = "trained"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerAccount:
    """The books of one policy, in samples for training; see `control/v1/ledger.proto`."""

    policy_id: PolicyId
    issued_count: int
    in_flight_count: int
    waiting_count: int
    fresh_count: int
    leased_count: int
    trained_count: int
    drops: tuple[DropCount, ...] = ()
    rolled_back_count: int = 0
    reissued_count: int = 0
    duplicate_count: int = 0
    replayed_count: int = 0

    @property
    def is_balanced(self) -> bool:
        live = self.in_flight_count + self.waiting_count + self.fresh_count + self.leased_count
        dropped = sum(drop.count for drop in self.drops)
        return self.issued_count == live + self.trained_count + dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlacement:
    """Where a rollout stands for one policy; see `control/v1/ledger.proto`."""

    policy_id: PolicyId
    place: RolloutPlace
    batch_id: BatchId | None = None
    step: int | None = None
    staleness: int | None = None
    use_count: int = 0
    reason: Reason | None = None
    filter: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutRecord:
    """A rollout and what became of it."""

    rollout: Rollout
    prompt_id: PromptId
    member_id: MemberId
    placements: tuple[RolloutPlacement, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutQuery:
    """Selects rollouts; None and empty select all.

    A policy together with a place or a batch means: there, for that policy.

    Attributes:
        policy_id: That has a trajectory in it.
        prompt_id: That it answers.
        group_id: That it belongs to.
        batch_id: That it was put into.
        rollout_id: This one.
        member_id: That made it.
        places: Any of these.
        outcomes: Any of these.
        min_reward: At least.
        max_reward: At most.
    """

    policy_id: PolicyId | None = None
    prompt_id: PromptId | None = None
    group_id: GroupId | None = None
    batch_id: BatchId | None = None
    rollout_id: RolloutId | None = None
    member_id: MemberId | None = None
    places: tuple[RolloutPlace, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    min_reward: float | None = None
    max_reward: float | None = None

    def __contains__(self, record: RolloutRecord) -> bool:
        rollout = record.rollout
        ids = (
            (self.prompt_id, record.prompt_id),
            (self.group_id, rollout.group_id),
            (self.rollout_id, rollout.rollout_id),
            (self.member_id, record.member_id),
        )
        if not all(wanted in (None, has) for wanted, has in ids):
            return False
        if self.outcomes and rollout.outcome not in self.outcomes:
            return False
        least = -inf if self.min_reward is None else self.min_reward
        most = inf if self.max_reward is None else self.max_reward
        reward = nan if rollout.reward is None else rollout.reward
        if (least, most) != (-inf, inf) and not least <= reward <= most:
            return False
        return not (self.policy_id or self.batch_id or self.places) or any(
            self.policy_id in (None, placement.policy_id)
            and self.batch_id in (None, placement.batch_id)
            and (not self.places or placement.place in self.places)
            for placement in record.placements
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A prompt that is no longer issued."""

    prompt: Prompt
    attempt_count: int
    failures: tuple[Failure, ...]
    create_time: datetime


class WaitCause(StrEnum):
    """What kind of wait it is; see `dataflow/v1/wait.proto`."""

    NO_TRAINER = "no_trainer"
    NO_RAAS = "no_raas"
    TOO_FEW_GROUPS = "too_few_groups"
    GROUP_INCOMPLETE = "group_incomplete"
    TASK_RUNNING = "task_running"
    MEMBER_SILENT = "member_silent"
    NO_CREDIT = "no_credit"
    STALENESS_LIMIT = "staleness_limit"
    VERSION_NOT_LIVE = "version_not_live"
    VERSION_BARRIER = "version_barrier"
    BATCH_HELD = "batch_held"
    ALL_DROPPED = "all_dropped"
    PAUSED = "paused"
    RECOVERING = "recovering"


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitReason:
    """One link of an explanation: what waits, and for what."""

    cause: WaitCause
    waiter_id: str
    subject_id: str = ""
    message: str = ""
    since_time: datetime | None = None
    resolve_time: datetime | None = None
