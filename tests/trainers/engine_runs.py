"""Runs of small recipes with an engine as their trainer: hub, node and weights on real sockets."""

import importlib.util
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from astraflow.testing import small_recipe, start_run

EXAMPLES = Path(__file__).parents[2] / "recipes" / "trainers"


def example(name):
    """Return a module among the recipes."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def vowels(prompt, text):
    """Score a text: letters drawn at random differ in it."""
    return sum(letter in "aeiou" for letter in text)


def vowel_recipe(folder, **trainer):
    """Return a recipe of three steps on groups of four."""
    changes = {f"policies.solver.trainer.{name}": value for name, value in trainer.items()}
    changes |= {"rollouts.group_size": 4}
    return small_recipe(folder, scorer="tests.trainers.engine_runs:vowels", changes=changes)


@asynccontextmanager
async def training(train, recipe, folder, **of_node):
    """Yield a run that is trained, and its node; at the end it is over.

    Args:
        train: Called with the arguments of `run_engine`, in a thread.
        recipe: Of the run.
        folder: Gets its folder.
        of_node: See `LiveRun.add_node`.
    """
    async with start_run(recipe, run_dir=folder / "run") as run:
        node = await run.add_node(**of_node)
        thread = run.add_thread(
            partial(
                train,
                hub=run.address,
                token=run.join_token,
                policy="solver",
                settings=recipe.policies["solver"].trainer,
                run_dir=folder / "run",
            )
        )
        yield run, node
        await run.finish()
    thread.result()
