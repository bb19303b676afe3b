"""Engines by their kind in a recipe."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from astraflow.config.extras import install_server
from astraflow.config.recipe import EngineSettings, Lora
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.engines.protocol import Engine
from astraflow.engines.served.interfaces import require_interfaces
from astraflow.engines.unsampled import UnsampledEngine

if TYPE_CHECKING:
    from astraflow.engines.served.dialect import Dialect


def build_engine(directory: Path, settings: EngineSettings, policy_id: PolicyId) -> Engine:
    """Return the engine of a model; weights come by `swap`. Needs a running event loop.

    Raises:
        AstraflowError: INVALID_FIELD when the directory or the settings do not fit.
    """
    if settings.kind == "none":
        return UnsampledEngine(settings.max_context)
    if settings.kind == "embedded":
        from astraflow.engines.embedded.engine import EmbeddedEngine  # noqa: PLC0415 - torch

        return EmbeddedEngine.from_directory(directory, settings, policy_id)
    from astraflow.engines.served.engine import ServedEngine  # noqa: PLC0415 - httpx
    from astraflow.engines.served.model import ModelDescription  # noqa: PLC0415

    dialect = dialect_of(settings)
    model = ModelDescription.read(directory, settings.max_context)
    return ServedEngine(dialect, model=model, settings=settings, policy_id=policy_id)


def dialect_of(settings: EngineSettings) -> "Dialect":
    """Return how the servers of a kind are spoken with.

    Raises:
        AstraflowError: INVALID_FIELD for a kind that is no server, or whose interpreter is missing;
            CAPABILITY_MISSING for a release that has other interfaces than are used.
    """
    match settings.kind:
        case "vllm":
            from astraflow.engines.vllm.dialect import VllmDialect  # noqa: PLC0415 - httpx

            return VllmDialect(_fit_python(settings))
        case "sglang":
            from astraflow.engines.sglang.dialect import SglangDialect  # noqa: PLC0415 - httpx

            return SglangDialect(_fit_python(settings))
        case _:
            raise AstraflowError(
                Reason.INVALID_FIELD, f"raas.engine.kind {settings.kind} is no server"
            )


def _fit_python(settings: EngineSettings) -> Path:
    python = server_python(settings)
    if settings.url is None:
        require_interfaces(settings.kind, python)
    return python


def build_adapter_engines(
    directory: Path,
    settings: EngineSettings,
    policies: Mapping[PolicyId, Lora],
    *,
    draws_all: bool = False,
) -> Mapping[PolicyId, Engine]:
    """Return the engines of policies that adapt the same model; adapters come by `swap`.

    Args:
        directory: Of the model.
        settings: Of the recipe.
        policies: What each adapts.
        draws_all: Whether padding and beginning of text are drawn, too.

    Raises:
        AstraflowError: INVALID_FIELD when the directory or the settings do not fit.
    """
    if settings.kind == "embedded":
        from astraflow.engines.embedded import engine  # noqa: PLC0415 - torch

        return engine.adapter_engines(directory, settings, policies, draws_all=draws_all)
    from astraflow.engines.served.adapter_engine import adapter_engines  # noqa: PLC0415 - httpx
    from astraflow.engines.served.model import ModelDescription  # noqa: PLC0415

    dialect = dialect_of(settings)
    model = ModelDescription.read(directory, settings.max_context)
    if draws_all:
        model = replace(model, special=replace(model.special, never_sampled=frozenset()))
    return adapter_engines(dialect, model=model, settings=settings, policies=policies)


def server_python(settings: EngineSettings) -> Path:
    """Return the interpreter that a server is started with.

    Raises:
        AstraflowError: INVALID_FIELD when none is named, or it is not there.
    """
    variable = f"ASTRAFLOW_{settings.kind.upper()}_PYTHON"
    said = os.environ.get(variable)
    named = settings.python or Path(said or "")
    if settings.url is None and not named.is_file():
        what = f"{named} is none" if settings.python or said else "none is named"
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"raas.engine.kind {settings.kind} needs the interpreter of an environment that has"
            f" it, and {what}: set raas.engine.python or {variable}, or attach by raas.engine.url;"
            f" to make one: {install_server(settings.kind)}",
        )
    return named
