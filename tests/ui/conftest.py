"""A run that a real hub recorded, and a browser's place at its page."""

import asyncio
import string
from contextlib import asynccontextmanager

import httpx
import pytest

from astraflow.config.loader import dump_recipe
from astraflow.testing import one_turn, small_recipe, start_run
from astraflow.ui.server import serve_page, shown_runs
from astraflow.workflows.protocol import Score
from astraflow.workflows.registry import workflow


def _score(text):
    small = sum(each in string.ascii_lowercase for each in text) / max(1, len(text))
    return Score(reward=small - 0.5, parts={"small": small, "other": 1 - small})


workflow("ui_letters")(one_turn(_score))


async def _record(folder):
    run_dir = folder / "small"
    changes = {
        "rollouts.group_size": 4,
        "policies.solver.trainer.step_count": 4,
        "hub.journal.kind": "none",
    }
    recipe = small_recipe(folder, workflow="ui_letters", changes=changes)
    async with start_run(recipe, run_dir=run_dir) as run:
        await run.add_node("raas-1")
        await run.add_node("raas-2")
        run.add_trainer()
        await run.finish()
    (run_dir / "recipe.yaml").write_text(dump_recipe(recipe))
    return run_dir


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    """The folder of a run of four steps that is over, of which half the groups are recorded."""
    return asyncio.run(_record(tmp_path_factory.mktemp("runs")))


@pytest.fixture
def serve():
    """Serves folders that were read once; gives what asks the page as a browser does."""

    @asynccontextmanager
    async def start(*folders):
        runs = shown_runs(folders)
        for run in runs:
            await asyncio.to_thread(run.index)
        async with (
            serve_page(runs) as url,
            httpx.AsyncClient(base_url=url.split("?")[0], follow_redirects=True) as client,
        ):
            assert (await client.get(url)).status_code == 200
            yield client

    return start
