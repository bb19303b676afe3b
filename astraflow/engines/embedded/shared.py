"""Several policies on one base model: an engine for each, and one module."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from astraflow.config.lora import base_of
from astraflow.config.recipe import EngineSettings, Lora
from astraflow.core.ids import PolicyId
from astraflow.core.rollouts import KvPolicy
from astraflow.engines.embedded.adapters import AdapterSlots, add_adapter_places, places_of
from astraflow.engines.embedded.base import Base, Plan
from astraflow.engines.embedded.engine import EmbeddedEngine
from astraflow.engines.embedded.weights import Slots, read_directory


def adapter_engines(
    model_dir: Path,
    settings: EngineSettings,
    policies: Mapping[PolicyId, Lora],
    *,
    draws_all: bool = False,
) -> Mapping[PolicyId, EmbeddedEngine]:
    """Build the engines of policies that train adapters beside the same model.

    The model's weights are read here, once; adapters come by `swap`, each policy's on its own.
    Closing one engine closes all.

    Args:
        model_dir: The Hugging Face directory that all start from.
        settings: Of the recipe.
        policies: What each adapts.
        draws_all: Whether padding and beginning of text are drawn, too.

    Raises:
        AstraflowError: INVALID_FIELD when the directory, the settings or the targets do not
            fit, APPLY_FAILED when its weights do not.
    """
    plan = Plan.of(model_dir, settings, draws_all=draws_all)
    slots = Slots(plan.module)
    slots.install(read_directory(model_dir, slots, version=0))
    places = places_of(list(policies.values()))
    add_adapter_places(plan.module, places)
    plan = replace(plan, decoding=replace(plan.decoding, adapters=places))
    base = Base(plan, thread_count=settings.thread_count, kv=KvPolicy(settings.kv))
    return {
        policy_id: EmbeddedEngine(policy_id, base, AdapterSlots(plan.module, place))
        for policy_id, place in zip(policies, places, strict=True)
    }


def checkpoint_engine(
    directory: Path, settings: EngineSettings, policy_id: PolicyId, *, lora: Lora | None
) -> EmbeddedEngine:
    """Build the engine of a checkpoint; `load_directory` brings its weights.

    Args:
        directory: Of Hugging Face, or with adapters, which name the model that they belong to.
        settings: Of the recipe.
        policy_id: Whose checkpoint it is.
        lora: What the policy adapts; None: it trains all weights.

    Raises:
        AstraflowError: INVALID_FIELD when the directory or the settings do not fit.
    """
    if lora is None:
        return EmbeddedEngine.from_directory(directory, settings, policy_id)
    return adapter_engines(base_of(directory), settings, {policy_id: lora})[policy_id]
