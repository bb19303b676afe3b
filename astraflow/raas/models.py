"""The engines of a node: one for each policy, or one for all that adapt the same model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from astraflow.config.recipe import EngineSettings, Recipe
from astraflow.core.ids import PolicyId
from astraflow.engines.protocol import Engine
from astraflow.raas.policies import ServedModel
from astraflow.workflows.agents.template import ChatTemplate, load_template, read_identity

if TYPE_CHECKING:
    from astraflow.engines.tokenizer import FastTokenizer

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


def policies_by_engine(
    recipe: Recipe, paths: Mapping[PolicyId, Path]
) -> Sequence[Sequence[PolicyId]]:
    """Return which policies share an engine: those with adapters beside the same model.

    Args:
        recipe: Of the run.
        paths: Model directory of every policy.
    """
    groups: dict[tuple[Path, str], list[PolicyId]] = {}
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

    tokenizer = load_tokenizer(directory)
    templates = {policy: chat_template(recipe, policy, directory) for policy in policies}
    identity = read_identity(directory)
    return {
        policy_id: ServedModel(
            engine=engine,
            tokenizer=tokenizer,
            template=templates[policy_id],
            turn_end_ids=turn_end_ids(templates[policy_id], tokenizer),
            identity=identity,
        )
        for policy_id, engine in _engines(recipe, policies, directory, settings).items()
    }


def chat_template(recipe: Recipe, policy: str, directory: Path) -> ChatTemplate:
    """Read the template of a policy's chats, and log what it does to chats of several turns.

    Raises:
        AstraflowError: INVALID_FIELD when it cannot be read, or does not show what a user says.
    """
    model = recipe.policies[policy].model
    template = load_template(
        directory, chat_template=model.chat_template, variables=model.chat_template_kwargs
    )
    for warning in template.check.warnings:
        log.warning(warning, policy_id=policy)
    return template


def turn_end_ids(template: ChatTemplate, tokenizer: "FastTokenizer") -> tuple[int, ...]:
    """Return the token that ends an answer of a chat, where the model's end tokens lack it."""
    end = template.turn_end_id(tokenizer)
    return () if end is None or end in tokenizer.special_ids.eos else (end,)


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
