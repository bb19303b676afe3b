"""The work of a recipe: data, workflows, rollouts and evaluations."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from astraflow.config.strict import Algorithm, Count, Finite, Name, Nbytes, Options, Seconds, Strict

_OF_HUB = ("split", "config", "revision")


class DataSet(Strict):
    """Rows that become prompts."""

    path: Path | None = None
    """JSONL or Parquet file, or a directory written by datasets.save_to_disk. Relative
    paths start at the recipe's folder."""
    hub: str | None = Field(default=None, pattern=r"^[\w.-]+(/[\w.-]+)?$")
    """org/name on the Hugging Face hub, in place of a path; needs the extra `datasets`."""
    split: str = "train"
    """Of hub."""
    config: str | None = None
    """Of hub; unset: its default."""
    revision: str | None = None
    """Of hub: branch, tag or commit. A run keeps the commit in its recipe. Unset: main."""
    seeds: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]] | None = None
    """[first, end]: rows {"seed": n}, end not among them, in place of a file, for environments that
    make their own tasks. Hold other seeds out."""
    format: Literal["auto", "jsonl", "parquet", "datasets"] = "auto"
    """Of path; auto: by its ending, or a directory of datasets."""
    id_field: str | None = None
    """Field with a stable id; unset: a digest of the row."""
    shuffle: bool = True
    """Another order in every epoch, from the run's seed."""
    max_prompt_chars: Count | None = Field(default=None, ge=1)
    """Rows whose length_field is longer are left out and counted."""
    length_field: str = "prompt"
    """The field whose length counts."""
    limit: Count | None = Field(default=None, ge=1)
    """Only the first so many rows."""

    @model_validator(mode="after")
    def _rows_come_from_one_place(self) -> Self:
        if sum(place is not None for place in (self.path, self.hub, self.seeds)) != 1:
            raise ValueError("give exactly one of 'path', 'hub' and 'seeds'")
        if self.seeds is not None and self.seeds[0] >= self.seeds[1]:
            raise ValueError("seeds: [first, end] has no seed; end is not one of them")
        fields = type(self).model_fields
        of_hub = [key for key in _OF_HUB if getattr(self, key) != fields[key].default]
        if self.hub is None and of_hub:
            raise ValueError(f"{', '.join(of_hub)}: only data of 'hub' has that")
        return self


class WorkflowConfig(Strict):
    """Code that turns a prompt into a rollout."""

    name: str
    """Registered workflow, or module:Class."""
    options: Options = Field(default={})
    """Checked by the workflow."""
    scorer: str | None = None
    """Registered scorer, or module:function; unset: the workflow scores."""
    scorer_options: Options = Field(default={})
    """Checked by the scorer."""
    policies: tuple[Name, ...] = ()
    """Policies that it samples from; empty: all of the recipe."""


class MixPhaseConfig(Strict):
    """How data sets are mixed from a version on."""

    weights: dict[Name, Annotated[Finite, Field(ge=0)]] = Field(min_length=1)
    """Shares by data set; they need not add up to 1."""
    from_version: Count = Field(default=0, ge=0)
    """First version of the workflow's first policy that it is for."""


class PayloadsConfig(Strict):
    """A store for the arrays of long rollouts, so that they do not go through the hub."""

    url: str = Field(pattern=r"^[a-z0-9]+://.")
    """Of a folder that hub, nodes and trainers reach, such as s3://bucket/payloads or
    file:///shared/payloads; each run has a folder of its own in it. Needs the extra `store`."""
    above_nbytes: Nbytes = Field(default=64 << 10, ge=0)
    """A trajectory whose arrays take so many bytes goes there: 9 for each token, and what routed
    experts and columns of a workflow take."""


class RolloutsConfig(Strict):
    """What is asked for in training."""

    data_set: Name | dict[Name, Annotated[Finite, Field(ge=0)]] | tuple[MixPhaseConfig, ...]
    """One data set, several by weight, or a schedule of weights by version."""
    workflow: Name
    """Name of a workflow of this recipe."""
    group_size: Count = Field(default=8, ge=1)
    """Rollouts per prompt."""
    min_group_size: Count = Field(default=2, ge=1)
    """A group with fewer rewarded rollouts is dropped."""
    epochs: Count | None = Field(default=None, ge=1)
    """Passes over the data set; unset: until the steps are done."""
    timeout_s: Seconds = Field(default=120.0, gt=0)
    """For one rollout, from its start."""
    max_attempts: Count = Field(default=3, ge=1)
    """Of one sample, when engines or environments fail; a node that is lost uses up none."""
    max_lost: Count = Field(default=10, ge=1)
    """A prompt is given up, as a dead letter, after so many nodes that were killed, cut off or
    preempted while they held samples of it: it may be what kills them."""
    keep_together: bool = True
    """One node samples a whole group, so that it reads the prompt once. Off: a group is spread over
    the pool, and is whole sooner when few groups are open."""
    policy_fault_reward: float = Field(default=0.0, allow_inf_nan=False)
    """Of a rollout that the policy broke (its program hung, crashed or broke limits), where the
    fault has no reward of its own. It is trained on like any other."""
    max_failed_groups: Count = Field(default=32, ge=1)
    """The run fails after so many groups in a row of which every rollout failed, for whatever
    reason."""
    max_filtered_groups: Count = Field(default=1024, ge=1)
    """The run fails after so many groups in a row of which `filters` left less than min_group_size
    to every policy; from a quarter of it on it warns."""
    max_failed_share: float = Field(default=0.5, gt=0, le=1)
    """The run fails when more than this share of the last 128 rollouts (32 at least) failed by a
    fault of a workflow, scorer or environment; above 0.2 it warns. 1: it goes on whatever fails."""
    selectors: tuple[Algorithm, ...] = ()
    """Decide which prompts are asked for: uniform, filter_solved, curriculum, greso, or your own.
    All of them have to admit a prompt; none: every prompt is asked for."""
    max_skips: Count = Field(default=256, ge=1)
    """After so many prompts in a row that were not admitted the next one is asked for."""
    filters: tuple[Algorithm, ...] = ()
    """Decide, in this order, what of a whole group is trained on: zero_advantage (dynamic
    sampling), reward_range, length, truncated, route, or your own."""
    payloads: PayloadsConfig | None = None
    """Unset: all goes through the hub."""

    @model_validator(mode="after")
    def _group_can_be_whole(self) -> Self:
        if self.min_group_size > self.group_size:
            raise ValueError("min_group_size is larger than group_size")
        return self

    @model_validator(mode="after")
    def _mix_has_weights(self) -> Self:
        if not self.mix or self.mix[0].from_version:
            raise ValueError("data_set: the first phase has to begin with from_version 0")
        versions = [phase.from_version for phase in self.mix]
        if sorted(set(versions)) != versions:
            raise ValueError("data_set: from_version has to rise from phase to phase")
        if not all(any(phase.weights.values()) for phase in self.mix):
            raise ValueError("data_set: every phase needs a weight above 0")
        return self

    @property
    def mix(self) -> tuple[MixPhaseConfig, ...]:
        """How data sets are mixed, phase by phase."""
        match self.data_set:
            case str(name):
                return (MixPhaseConfig(weights={name: 1.0}),)
            case dict(weights):
                return (MixPhaseConfig(weights=weights),)
            case phases:
                return phases

    @property
    def data_sets(self) -> tuple[str, ...]:
        """All data sets that prompts come from."""
        return tuple(dict.fromkeys(name for phase in self.mix for name in phase.weights))


class Relation(Strict):
    """How the versions of several policies go together."""

    kind: Literal["independent", "bounded_skew", "lockstep"] = "independent"
    """independent: each trains at its own pace. bounded_skew: none is more than max_skew versions
    ahead of another. lockstep: one version at a time, and the pool sees new versions of all
    policies together."""
    max_skew: Count = Field(default=1, ge=1)
    """Versions that one policy may be ahead of another; of bounded_skew."""
    timeout_s: Seconds = Field(default=60.0, gt=0)
    """For how long the others wait for a policy whose trainer is gone, from its last sign of life;
    a slow trainer is waited for."""
    on_timeout: Literal["go_on", "stop"] = "go_on"
    """go_on: the others train without it until it is back. stop: the run fails and says why."""


class EvalSet(Strict):
    """One data set of a suite."""

    data_set: Name
    """Name of a data set of this recipe."""
    workflow: Name
    """Name of a workflow of this recipe."""
    repeats: Count = Field(default=1, ge=1)
    """Rollouts per prompt."""
    correct_reward: Finite = 1.0
    """A rollout is correct when its reward is at least this."""


class EvalSampling(Strict):
    """What an evaluation samples with in place of `policies.*.sampling`; unset: the same."""

    temperature: Finite | None = Field(default=None, ge=0)
    """As `policies.NAME.sampling.temperature`."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """As `policies.NAME.sampling.top_p`."""
    top_k: Count | None = Field(default=None, ge=1)
    """As `policies.NAME.sampling.top_k`."""
    min_p: float | None = Field(default=None, ge=0, lt=1)
    """As `policies.NAME.sampling.min_p`."""
    max_new_tokens: Count | None = Field(default=None, ge=1)
    """As `policies.NAME.sampling.max_new_tokens`."""
    min_new_tokens: Count | None = Field(default=None, ge=0)
    """As `policies.NAME.sampling.min_new_tokens`."""
    stop_strings: tuple[str, ...] | None = None
    """As `policies.NAME.sampling.stop_strings`."""

    @property
    def changes(self) -> dict[str, Any]:
        """Fields of SamplingParams that differ."""
        return self.model_dump(exclude_none=True)


class EvalSuiteConfig(Strict):
    """An evaluation, run beside training on pinned versions."""

    data_sets: tuple[EvalSet, ...] = Field(min_length=1)
    """What is measured."""
    at_start: bool = True
    """Measure the first weights."""
    at_end: bool = True
    """Measure the last weights."""
    every: Count | None = Field(default=None, ge=1)
    """Versions of the first policy between evaluations."""
    pool_share: float = Field(default=0.5, gt=0, le=1)
    """Share of the pool's capacity that it may take while training goes on."""
    sampling: EvalSampling = EvalSampling()
    """What is given here takes the place of the policies' own, such as temperature: 0."""
