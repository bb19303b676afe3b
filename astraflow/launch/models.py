"""The model directory of each policy: given by the recipe, or got or made on first use."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

from rich.markup import escape

from astraflow.config.model_dirs import must_be_model
from astraflow.config.recipe import Recipe
from astraflow.config.run_dir import RunDir
from astraflow.core.errors import AstraflowError, Reason
from astraflow.engines.hub import commit_of
from astraflow.launch.gpus import GpuPlan, gpu_environment
from astraflow.launch.processes import LocalExecutor, RoleCommand
from astraflow.workflows.data_sets import download_data_set, pinned_data_set


def pinned(recipe: Recipe, *, note: Callable[[str], None]) -> Recipe:
    """Return a recipe whose models and data of the Hugging Face hub are of one commit each.

    Data is downloaded, for a hub that starts has no time for it.

    Raises:
        AstraflowError: What `commit_of` and `download_data_set` raise.
    """
    policies = dict(recipe.policies)
    for name, policy in recipe.policies.items():
        if policy.model.hub is not None:
            commit = commit_of(policy.model.hub, policy.model.revision)
            model = policy.model.model_copy(update={"revision": commit})
            policies[name] = policy.model_copy(update={"model": model})
    data = {name: pinned_data_set(each) for name, each in recipe.data.items()}
    for name, each in data.items():
        if each.hub is not None:
            download_data_set(each, report=lambda line, name=name: note(escape(f"{name}: {line}")))
    return recipe.model_copy(update={"policies": policies, "data": data})


async def prepare_models(
    recipe: Recipe,
    run_dir: RunDir,
    *,
    executor: LocalExecutor,
    note: Callable[[str], None],
    gpus: GpuPlan | None = None,
) -> dict[str, Path]:
    """Return the model directory of every policy; those to get or to make are so side by side.

    Args:
        recipe: Of the run.
        run_dir: Takes models that are made, and logs.
        executor: Starts what gets or makes them.
        note: Told of progress.
        gpus: A model is made where it is trained later; None: on what the launcher sees.

    Raises:
        AstraflowError: INVALID_FIELD for a path without a model in it, INTERNAL when one could
            not be got or made.
    """
    # The first policy that starts from the same model, which is made once.
    origins = {
        name: each.model.model_copy(update={"lora": None}) for name, each in recipe.policies.items()
    }
    firsts = {
        name: next(other for other, origin in origins.items() if origin == mine)
        for name, mine in origins.items()
    }
    async with asyncio.TaskGroup() as group:
        tasks = {
            policy: group.create_task(
                _prepare(recipe, policy, run_dir, executor=executor, note=note, gpus=gpus)
            )
            for policy in dict.fromkeys(firsts.values())
        }
    return {policy: tasks[first].result() for policy, first in firsts.items()}


async def _prepare(
    recipe: Recipe,
    policy: str,
    run_dir: RunDir,
    *,
    executor: LocalExecutor,
    note: Callable[[str], None],
    gpus: GpuPlan | None,
) -> Path:
    model = recipe.policies[policy].model
    if model.path is not None and model.path.suffix != ".gguf":
        must_be_model(model.path, where=f"policies.{policy}.model.path")
        if model.warm_up is None:
            return model.path
    target = run_dir.root / f"model-{policy}.json"
    share = None if gpus is None else gpus.share(f"trainer-{policy}")
    command = RoleCommand(
        name=f"warm-up-{policy}",
        arguments=(
            *("trainer", "warm-up", str(run_dir.recipe), "--policy", policy),
            *("--write-path", str(target)),
        ),
        # Bars that libraries draw would fill the log.
        environment={
            "OMP_NUM_THREADS": "1",
            "TQDM_DISABLE": "1",
            **gpu_environment(gpus, share, is_torch=True),
        },
        log=run_dir.log(f"warm-up-{policy}"),
    )
    process = await executor.start(command, on_line=lambda line: note(escape(f"{policy}: {line}")))
    try:
        code = await process.wait()
    finally:
        await process.end(grace_s=1)
    if code:
        raise AstraflowError(
            Reason.INTERNAL,
            f"the model of {policy} could not be made ({code}):\n{process.last_words()}",
        )
    return Path(json.loads(target.read_text())["path"])
