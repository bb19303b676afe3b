"""The model directory of each policy: given by the recipe, or made on first use and cached."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

from astraflow.config.recipe import Model, Recipe
from astraflow.config.run_dir import RunDir
from astraflow.core.errors import AstraflowError, Reason
from astraflow.engines.models import cache_dir, must_be_model
from astraflow.launch.processes import RoleCommand, RoleProcess


async def prepare_models(
    recipe: Recipe, run_dir: RunDir, *, lifeline: int, note: Callable[[str], None]
) -> dict[str, Path]:
    """Return the model directory of every policy; those with a warm-up are made side by side.

    Raises:
        AstraflowError: INVALID_FIELD for a path without a model in it, INTERNAL when a
            warm-up failed.
    """
    firsts = {policy: _first_alike(recipe, policy) for policy in recipe.policies}
    async with asyncio.TaskGroup() as group:
        tasks = {
            policy: group.create_task(_prepare(recipe, policy, run_dir, lifeline, note))
            for policy in dict.fromkeys(firsts.values())
        }
    return {policy: tasks[first].result() for policy, first in firsts.items()}


def _first_alike(recipe: Recipe, policy: str) -> str:
    """Return the first policy that starts from the same model, which is made once."""
    mine = recipe.policies[policy].model
    return next(
        other
        for other, each in recipe.policies.items()
        if (each.model.path, each.model.warm_up) == (mine.path, mine.warm_up)
    )


async def _prepare(
    recipe: Recipe, policy: str, run_dir: RunDir, lifeline: int, note: Callable[[str], None]
) -> Path:
    model = recipe.policies[policy].model
    if model.path is not None:
        return check_model(model, policy)
    target = run_dir.root / f"model-{policy}.json"
    command = RoleCommand(
        name=f"warm-up-{policy}",
        arguments=(
            *("trainer", "warm-up", str(run_dir.recipe), "--policy", policy),
            *("--write-path", str(target)),
        ),
        environment={"OMP_NUM_THREADS": "1"},
        log=run_dir.log(f"warm-up-{policy}"),
    )
    note(f"{policy}: making the warm-up model, or taking it from {cache_dir()}")
    process = await RoleProcess.start(command, lifeline=lifeline)
    try:
        code = await process.wait()
    finally:
        await process.end(grace_s=1)
    if code:
        raise AstraflowError(
            Reason.INTERNAL, f"the warm-up of {policy} failed ({code}):\n{process.last_words()}"
        )
    return Path(json.loads(target.read_text())["path"])


def check_model(model: Model, policy: str) -> Path:
    """Return the directory of a given model.

    Raises:
        AstraflowError: INVALID_FIELD when it is not there or lacks a file.
    """
    path = model.path
    if path is None:
        raise AstraflowError(Reason.INVALID_FIELD, f"policies.{policy}.model has no path")
    must_be_model(path, where=f"policies.{policy}.model.path")
    return path
