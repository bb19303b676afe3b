"""Settings of a run: the recipe without its files and processes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import Any

from astraflow.core.autoscale import ScaleSettings
from astraflow.core.evals import EvalSuiteInfo
from astraflow.core.ids import PolicyId, RunId, WorkflowId
from astraflow.core.tasks import SamplingParams, WorkflowSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PlugInSpec:
    """An algorithm as a recipe names it.

    Attributes:
        name: Built in, an entry point of an installed package, or module:Class.
        options: Its fields.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Baseline(StrEnum):
    """What a reward is compared with."""

    GROUP = "group"
    LEAVE_ONE_OUT = "leave_one_out"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongSettings:
    """Takes off the reward of long rows, softly.

    Attributes:
        max_tokens: Sampled tokens from which on all of `penalty` is taken off.
        buffer_tokens: So many before that it begins.
        penalty: At most.
    """

    max_tokens: int
    buffer_tokens: int
    penalty: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageSettings:
    """How rewards become advantages.

    Attributes:
        baseline: What a reward is compared with.
        scale_by_std: Divide by the group's standard deviation.
        is_population_std: Whether that one divides by n; else by n - 1.
        estimator: module:function in place of all three; None: none.
        overlong: None: length costs nothing.
        agents: What holds for some agents in place of all that.
    """

    baseline: Baseline = Baseline.GROUP
    scale_by_std: bool = False
    is_population_std: bool = False
    estimator: str | None = None
    overlong: OverlongSettings | None = None
    agents: "Mapping[str, AdvantageSettings]" = field(
        default_factory=dict[str, "AdvantageSettings"]
    )


class RelationKind(StrEnum):
    """How the versions of several policies go together."""

    INDEPENDENT = "independent"
    BOUNDED_SKEW = "bounded_skew"
    LOCKSTEP = "lockstep"


class OnTimeout(StrEnum):
    """What becomes of a run when a policy without a trainer was waited for long enough."""

    GO_ON = "go_on"
    STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRelation:
    """What the recipe says of versions of different policies.

    Attributes:
        kind: Independent policies never wait for each other.
        max_skew: Versions that one may be ahead, at least 1; of BOUNDED_SKEW.
        timeout: For how long a policy without a trainer is waited for.
        on_timeout: What comes then.
    """

    kind: RelationKind = RelationKind.INDEPENDENT
    max_skew: int = 1
    timeout: timedelta = timedelta(seconds=60)
    on_timeout: OnTimeout = OnTimeout.GO_ON

    @property
    def max_lead(self) -> int | None:
        """Versions that one policy may be ahead of another; None: any."""
        match self.kind:
            case RelationKind.INDEPENDENT:
                return None
            case RelationKind.BOUNDED_SKEW:
                return self.max_skew
            case RelationKind.LOCKSTEP:
                return 1


class BufferOrder(StrEnum):
    """Which group comes first."""

    EDF = "edf"
    FIFO = "fifo"


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSettings:
    """What a buffer holds, and in which order.

    Attributes:
        order: Earliest deadline first, which is what turns stale first, or first in, first out.
        max_groups: Most groups; None: as many as may be open.
        max_nbytes: Most bytes of tokens, log-probabilities, masks and columns; None: no bound.
            Groups of one batch are kept whatever they take.
    """

    order: BufferOrder = BufferOrder.EDF
    max_groups: int | None = None
    max_nbytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """What is replayed.

    Attributes:
        ratio: Of a batch's groups, at most; in [0, 1).
        order: Which of those that may be.
        max_uses: Batches that a group is in, the first one included.
        max_staleness: Versions between sampling and the last use, at most.
        max_groups: Groups that are kept.
        max_nbytes: Bytes of tokens, log-probabilities, masks and columns that they may take.
    """

    ratio: float = 0.0
    order: PlugInSpec = field(default_factory=lambda: PlugInSpec(name="latest"))
    max_uses: int = 2
    max_staleness: int = 0
    max_groups: int = 1024
    max_nbytes: int = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MixPhaseSettings:
    """How data sets are mixed from a version on.

    Attributes:
        weights: By data set; those that are left out give nothing.
        from_version: First version of the workflow's first policy that it is for.
    """

    weights: Mapping[str, float]
    from_version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """How one policy is trained.

    Attributes:
        groups_per_batch: Groups (prompts) per batch.
        max_staleness: Versions between sampling and training, at most.
        steps_per_version: Optimizer steps between versions; None: one comes when it is asked for.
        step_count: Batches to train on; None: until the data ends.
        advantages: How rewards become advantages.
        sampling: Defaults of its generations; the seed is set by the run.
        buffer: What its fresh buffer holds, and in which order.
        replay: What it trains on again.
        guards: Refuse batches, in this order.
        max_refusals: After so many in a row a batch is served as it is.
        needs_routes: Whether members have to tell or replay which experts tokens go through.
    """

    policy_id: PolicyId
    groups_per_batch: int
    max_staleness: int
    steps_per_version: int | None = 1
    step_count: int | None = None
    advantages: AdvantageSettings = field(default_factory=AdvantageSettings)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    buffer: BufferSettings = field(default_factory=BufferSettings)
    replay: ReplaySettings = field(default_factory=ReplaySettings)
    guards: tuple[PlugInSpec, ...] = ()
    max_refusals: int = 4
    needs_routes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """What is asked for in training.

    Attributes:
        workflow_id: One of the run's workflows.
        group_size: Rollouts per prompt.
        min_group_size: A group with fewer rewarded rollouts is dropped.
        timeout: For one rollout, from its start.
        max_attempts: Of one sample, when engines or environments fail.
        max_lost: A prompt is given up after so many members that were lost with samples of it.
        max_failed_groups: The run fails after so many groups in a row of which every
            rollout failed.
        max_filtered_groups: The run fails after so many groups in a row that filters left too
            little of for any policy.
        max_failed_share: The run fails when more of the last rollouts did; 1: never.
        keeps_together: One RaaS samples a whole group, if any can.
        mix: How data sets are mixed, at least one phase; the first from version 0.
        row_count: Of all its data sets together.
        selectors: Decide which prompts are asked for; all of them have to admit one.
        max_skips: After so many prompts in a row that were not admitted the next one is.
        filters: Decide what of a whole group is trained on, in this order.
    """

    workflow_id: WorkflowId
    group_size: int
    min_group_size: int = 1
    timeout: timedelta = timedelta(seconds=120)
    max_attempts: int = 3
    max_lost: int = 10
    max_failed_groups: int = 32
    max_filtered_groups: int = 1024
    max_failed_share: float = 0.5
    keeps_together: bool = True
    mix: tuple[MixPhaseSettings, ...] = (MixPhaseSettings(weights={"train": 1.0}),)
    row_count: int = 1
    selectors: tuple[PlugInSpec, ...] = ()
    max_skips: int = 256
    filters: tuple[PlugInSpec, ...] = ()

    @property
    def unit(self) -> int:
        """Samples of a group that one RaaS gets at once, if it has room for them."""
        return self.group_size if self.keeps_together else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteSettings:
    """An evaluation beside training.

    Attributes:
        suite: What is measured.
        at_start: Measure version 0.
        at_end: Measure the last version.
        every: Versions of the suite's first policy between evaluations.
        pool_share: Of the pool's credit, while training goes on.
        sampling: Fields of SamplingParams that differ from the policies'.
    """

    suite: EvalSuiteInfo
    at_start: bool = True
    at_end: bool = True
    every: int | None = None
    pool_share: float = 0.5
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """One run.

    Attributes:
        run_id: Part of every id that the run mints.
        seed: Of sampling; the RaaS derives that of each sample.
        policies: In the order of the recipe.
        workflows: All that tasks may name.
        rollouts: What is asked for in training.
        suites: Evaluations by name.
        relation: How the versions of the policies go together.
        scale: Bounds of the pool, and how it is measured.
        session_ttl: A member that says nothing for so long is gone.
        max_message_nbytes: Largest message that the hub reads.
        first_version_grace: For how long every RaaS may fail to load a policy that nobody
            serves yet; then the run fails.
        leave_grace: How long members may take to leave once the run is over.
        last_version_grace: How long the end of the data waits for the last version to be
            live on every RaaS, so that nobody needs a trainer that has left.
        kept_rollout_count: Rollouts that can be listed.
        kept_rollout_nbytes: Bytes of tokens and columns that they may take.
        kept_version_count: Versions per policy that can be listed.
        takes_payloads: Whether the run has a payload store.
    """

    run_id: RunId
    seed: int = 0
    policies: tuple[PolicySettings, ...]
    workflows: tuple[WorkflowSpec, ...]
    rollouts: RolloutSettings
    suites: tuple[SuiteSettings, ...] = ()
    relation: VersionRelation = field(default_factory=VersionRelation)
    scale: ScaleSettings = field(default_factory=ScaleSettings)
    session_ttl: timedelta = timedelta(seconds=10)
    max_message_nbytes: int = 64 << 20
    first_version_grace: timedelta = timedelta(seconds=60)
    leave_grace: timedelta = timedelta(seconds=10)
    last_version_grace: timedelta = timedelta(seconds=30)
    kept_rollout_count: int = 1024
    kept_rollout_nbytes: int = 16 << 20
    kept_version_count: int = 64
    takes_payloads: bool = False

    @property
    def workflow(self) -> WorkflowSpec:
        return {each.workflow_id: each for each in self.workflows}[self.rollouts.workflow_id]
