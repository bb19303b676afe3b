"""`astraflow run`: runs a recipe to its end, or goes on with a run that died."""

import asyncio
import time
from pathlib import Path

from rich.console import Console

from astraflow.config.loader import dump_recipe
from astraflow.config.recipe import Recipe
from astraflow.config.run_dir import RunDir
from astraflow.launch.launcher import Launch
from astraflow.launch.models import pinned
from astraflow.launch.plot import draw_reward
from astraflow.launch.report import show_summary
from astraflow.launch.roles import RunTokens
from astraflow.launch.run_folder import (
    claim_run_dir,
    endpoint_before,
    must_have,
    next_node_index,
    reopen_run,
)
from astraflow.launch.summary import RunSummary, summarise
from astraflow.launch.tracking.follower import followed


def run_recipe(recipe: Recipe, *, runs: Path, console: Console) -> RunSummary:
    """Run a recipe to its end.

    Ctrl-C once drains: what is under way is trained on, and the run ends; twice stops it.

    Args:
        recipe: Resolved, with absolute paths.
        runs: The run's folder is made in here, under the recipe's name; an older one of that
            name is moved aside.
        console: Where progress and the final table go.

    Raises:
        AstraflowError: A run of this name is live, a model is missing, a process could not start,
            something of the Hugging Face hub cannot be had.
    """
    run_dir = claim_run_dir(runs, recipe.name)
    recipe = _with_trace_folder(pinned(recipe, note=console.print), run_dir)
    run_dir.recipe.write_text(dump_recipe(recipe))
    return _see_through(Launch(recipe=recipe, run_dir=run_dir, console=console))


def resume_run(folder: Path, *, console: Console, checkpoint_id: str = "") -> RunSummary:
    """Go on with a run whose processes died, from its journal and its last checkpoints.

    Args:
        folder: Of the run.
        console: Where progress and the final table go.
        checkpoint_id: Of the whole run, which every trainer goes back to; empty: the last ones.

    Raises:
        AstraflowError: NOT_READY when there is no journal; NAME_TAKEN when the run is live;
            CHECKPOINT_UNKNOWN; what `run_recipe` raises.
    """
    run_dir = RunDir(folder)
    must_have(run_dir, checkpoint_id)
    recipe = reopen_run(run_dir)
    before = endpoint_before(run_dir)
    tokens = RunTokens()
    if before is not None:
        tokens = RunTokens(join=before.join_token, operator=before.operator_token)
    return _see_through(
        Launch(
            recipe=recipe,
            run_dir=run_dir,
            console=console,
            tokens=tokens,
            is_resumed=True,
            checkpoint_id=checkpoint_id,
            first_raas=next_node_index(run_dir),
        )
    )


def _see_through(launch: Launch) -> RunSummary:
    """Run to the end, and tell what came of it."""
    started = time.monotonic()
    with followed(launch.run_dir, launch.recipe.track):
        state, failure = asyncio.run(launch.run())
    summary = summarise(
        launch.run_dir,
        name=launch.recipe.name,
        seed=launch.recipe.seed,
        state=state,
        wall_s=time.monotonic() - started,
        failure=failure,
    )
    draw_reward(launch.run_dir)
    show_summary(launch.console, summary, launch.run_dir)
    return summary


def _with_trace_folder(recipe: Recipe, run_dir: RunDir) -> Recipe:
    """Let all processes write their spans into one folder."""
    if recipe.tracing.path is not None:
        return recipe
    tracing = recipe.tracing.model_copy(update={"path": run_dir.root.absolute() / "traces"})
    return recipe.model_copy(update={"tracing": tracing})
