"""Settings: what the state machine needs of a recipe."""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from datetime import timedelta

from astraflow.config import recipe as config
from astraflow.core.algorithms.finding import Point, must_not_read_tokens
from astraflow.core.autoscale import ScaleSettings
from astraflow.core.evals import EvalDataSet, EvalSuiteInfo
from astraflow.core.ids import PolicyId, RunId, WorkflowId
from astraflow.core.settings import (
    AdvantageSettings,
    Baseline,
    BufferOrder,
    BufferSettings,
    MixPhaseSettings,
    OnTimeout,
    OverlongSettings,
    PlugInSpec,
    PolicySettings,
    RelationKind,
    ReplaySettings,
    RolloutSettings,
    RunSettings,
    SuiteSettings,
    VersionRelation,
)
from astraflow.workflows.building import workflow_specs


def run_settings(
    recipe: config.Recipe, *, run_id: RunId, size_of: Callable[[str], int]
) -> RunSettings:
    """Translate a recipe.

    Raises:
        AstraflowError: CODE_UNKNOWN when a workflow or scorer is not here; INVALID_FIELD for an
            algorithm that reads tokens beside a payload store.
    """
    must_be_able(recipe)
    return RunSettings(
        run_id=run_id,
        seed=recipe.seed,
        policies=tuple(policy_settings(name, policy) for name, policy in recipe.policies.items()),
        workflows=workflow_specs(recipe),
        rollouts=_rollouts(recipe.rollouts, size_of),
        relation=_relation(recipe.relation),
        scale=_scale(recipe.autoscale),
        suites=tuple(_suite(recipe, name, size_of) for name in recipe.evals),
        session_ttl=timedelta(seconds=recipe.hub.session_ttl_s),
        takes_payloads=recipe.rollouts.payloads is not None,
    )


def must_be_able(recipe: config.Recipe) -> None:
    """Refuse algorithms that read tokens where these do not go through the hub.

    Raises:
        AstraflowError: INVALID_FIELD; CODE_UNKNOWN.
    """
    if recipe.rollouts.payloads is None:
        return
    trainers = [policy.trainer for policy in recipe.policies.values()]
    orders = [each.replay.order for each in trainers if each.replay is not None]
    guards = [guard for each in trainers for guard in each.guards]
    for point, algorithms in (
        (Point.FILTER, recipe.rollouts.filters),
        (Point.ORDER, orders),
        (Point.GUARD, guards),
    ):
        for algorithm in algorithms:
            must_not_read_tokens(point, algorithm.name)


def _scale(autoscale: config.AutoscaleConfig) -> ScaleSettings:
    return ScaleSettings(
        min_count=autoscale.min,
        max_count=autoscale.max,
        window=timedelta(seconds=autoscale.window_s),
        cooldown=timedelta(seconds=autoscale.cooldown_s),
    )


def _relation(relation: config.Relation) -> VersionRelation:
    return VersionRelation(
        kind=RelationKind(relation.kind),
        max_skew=relation.max_skew,
        timeout=timedelta(seconds=relation.timeout_s),
        on_timeout=OnTimeout(relation.on_timeout),
    )


def settings_digest(recipe: config.Recipe) -> bytes:
    """Return 16 bytes over what the decisions of a run depend on, but its numbers of steps."""
    parts = {"seed", "data", "workflows", "rollouts", "evals", "relation"}
    said = recipe.model_dump(mode="json", include=parts, exclude_defaults=True)
    said["policies"] = {
        name: asdict(replace(policy_settings(name, policy), step_count=None))
        for name, policy in recipe.policies.items()
    }
    said["session_ttl_s"] = recipe.hub.session_ttl_s
    text = json.dumps(said, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def policy_settings(name: str, policy: config.PolicyConfig) -> PolicySettings:
    """Return what the hub decides by for one policy."""
    return PolicySettings(
        policy_id=PolicyId(name),
        groups_per_batch=policy.trainer.groups_per_batch,
        max_staleness=policy.trainer.max_staleness,
        steps_per_version=policy.trainer.sync.steps_per_version,
        step_count=policy.trainer.step_count,
        advantages=_advantages(policy.trainer.advantages),
        sampling=policy.sampling.params,
        buffer=BufferSettings(
            order=BufferOrder(policy.trainer.buffer.order),
            max_groups=policy.trainer.buffer.max_groups,
            max_nbytes=policy.trainer.buffer.max_nbytes,
        ),
        replay=_replay(policy.trainer),
        guards=_specs(policy.trainer.guards),
        max_refusals=policy.trainer.max_refusals,
        needs_routes=policy.trainer.router_replay == "required",
    )


def _advantages(advantages: config.AgentAdvantages) -> AdvantageSettings:
    overlong = advantages.overlong
    agents = advantages.agents if isinstance(advantages, config.Advantages) else {}
    return AdvantageSettings(
        baseline=Baseline(advantages.baseline),
        scale_by_std=advantages.scale_by_std,
        is_population_std=advantages.std == "population",
        estimator=advantages.estimator,
        overlong=None if overlong is None else OverlongSettings(**overlong.model_dump()),
        agents={name: _advantages(each) for name, each in agents.items()},
    )


def _replay(trainer: config.TrainerConfig) -> ReplaySettings:
    replay = trainer.replay
    if replay is None:
        return ReplaySettings()
    bound = trainer.max_staleness if replay.max_staleness is None else replay.max_staleness
    return ReplaySettings(
        ratio=replay.ratio,
        order=PlugInSpec(name=replay.order.name, options=replay.order.options),
        max_uses=replay.max_uses,
        max_staleness=bound,
        max_groups=replay.max_groups,
        max_nbytes=replay.max_nbytes,
    )


def _rollouts(rollouts: config.RolloutsConfig, size_of: Callable[[str], int]) -> RolloutSettings:
    return RolloutSettings(
        workflow_id=WorkflowId(rollouts.workflow),
        group_size=rollouts.group_size,
        min_group_size=rollouts.min_group_size,
        timeout=timedelta(seconds=rollouts.timeout_s),
        max_attempts=rollouts.max_attempts,
        max_lost=rollouts.max_lost,
        max_failed_groups=rollouts.max_failed_groups,
        max_filtered_groups=rollouts.max_filtered_groups,
        max_failed_share=rollouts.max_failed_share,
        keeps_together=rollouts.keep_together,
        mix=tuple(
            MixPhaseSettings(weights=phase.weights, from_version=phase.from_version)
            for phase in rollouts.mix
        ),
        row_count=sum(map(size_of, rollouts.data_sets)),
        selectors=_specs(rollouts.selectors),
        max_skips=rollouts.max_skips,
        filters=_specs(rollouts.filters),
    )


def _specs(algorithms: Iterable[config.Algorithm]) -> tuple[PlugInSpec, ...]:
    return tuple(PlugInSpec(name=each.name, options=each.options) for each in algorithms)


def _suite(recipe: config.Recipe, name: str, size_of: Callable[[str], int]) -> SuiteSettings:
    settings = recipe.evals[name]
    parts = tuple(
        EvalDataSet(
            data_set=part.data_set,
            workflow_id=WorkflowId(part.workflow),
            prompt_count=size_of(part.data_set),
            repeats=part.repeats,
            correct_reward=part.correct_reward,
        )
        for part in settings.data_sets
    )
    named = {policy for part in settings.data_sets for policy in recipe.policies_of(part.workflow)}
    policies = tuple(PolicyId(policy) for policy in recipe.policies if policy in named)
    return SuiteSettings(
        suite=EvalSuiteInfo(suite=name, data_sets=parts, policy_ids=policies),
        at_start=settings.at_start,
        at_end=settings.at_end,
        every=settings.every,
        pool_share=settings.pool_share,
        sampling=settings.sampling.changes,
    )
