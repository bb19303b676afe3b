"""The engines of a node: one for each policy, or one for all that adapt the same model."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from astraflow.config.recipe import Engine as EngineSettings
from astraflow.config.recipe import Recipe
from astraflow.core.ids import PolicyId
from astraflow.engines.protocol import Engine
from astraflow.raas.policies import ServedModel
from astraflow.workflows.agents.template import load_template
from astraflow.workflows.model_identity import read_identity


def policies_by_engine(recipe: Recipe, paths: Mapping[str, Path]) -> Sequence[Sequence[str]]:
    """Return which policies share an engine: those with adapters beside the same model.

    Args:
        recipe: Of the run.
        paths: Model directory of every policy.
    """
    groups: dict[tuple[Path, str], list[str]] = {}
    for policy, path in paths.items():
        is_adapted = recipe.policies[policy].model.lora is not None
        groups.setdefault((path.resolve(), "" if is_adapted else policy), []).append(policy)
    return list(groups.values())


def load_models(
    recipe: Recipe, policies: Sequence[str], directory: Path, settings: EngineSettings
) -> Mapping[PolicyId, ServedModel]:
    """Build one engine and what goes with it for the policies that share it.

    Args:
        recipe: Of the run.
        policies: That share it.
        directory: Model that they start from.
        settings: Of this engine.

    Raises:
        AstraflowError: INVALID_FIELD when the model or the settings do not fit.
    """
    from astraflow.engines.tokenizer import load_tokenizer  # noqa: PLC0415

    tokenizer, template = load_tokenizer(directory), load_template(directory)
    identity = read_identity(directory)
    return {
        policy_id: ServedModel(
            engine=engine, tokenizer=tokenizer, template=template, identity=identity
        )
        for policy_id, engine in _engines(recipe, policies, directory, settings).items()
    }


def _engines(
    recipe: Recipe, policies: Sequence[str], directory: Path, settings: EngineSettings
) -> Mapping[PolicyId, Engine]:
    from astraflow.engines.building import (  # noqa: PLC0415 - loads torch or httpx
        build_adapter_engines,
        build_engine,
    )

    adapted = {
        PolicyId(policy): lora
        for policy in policies
        if (lora := recipe.policies[policy].model.lora) is not None
    }
    if adapted:
        return build_adapter_engines(directory, settings, adapted)
    policy_id = PolicyId(policies[0])
    return {policy_id: build_engine(directory, settings, policy_id)}
