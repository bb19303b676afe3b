import asyncio

import pytest

from astraflow.config.run_dir import HubEndpoint
from astraflow.core.errors import AstraflowError, Reason
from astraflow.launch.operations import evaluate_live
from astraflow.testing import JOIN_TOKEN, OPERATOR_TOKEN, small_recipe, start_run

SUITE = {"data_sets": [{"data_set": "train", "workflow": "main", "repeats": 2}]}
CHANGES = {
    "evals": {"held_out": SUITE | {"at_start": False, "at_end": False}},
    "policies.solver.trainer.step_count": 200,
    "data.train.limit": 4,
}


async def live_run(run):
    run.run_dir.write_endpoint(
        HubEndpoint(
            address=run.address, pid=0, operator_token=OPERATOR_TOKEN, join_token=JOIN_TOKEN
        )
    )
    run.add_trainer()
    node = await run.add_node(answer=lambda text: "yes")
    await node.engine.until(lambda: node.engine.version is not None)


async def test_a_run_measures_itself_while_it_trains(tmp_path):
    rows = [{"prompt": f"row {n}", "answer": "yes"} for n in range(4)]
    recipe = small_recipe(tmp_path, scorer="exact", prompts=rows, changes=CHANGES)
    seen = []
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        await live_run(run)
        async with asyncio.timeout(100):
            done = await evaluate_live(
                run.run_dir, "held_out", versions={}, pool_share=0.25, note=seen.append
            )
    assert done.overall.avg_at_k == 1.0
    assert done.overall.pass_at_k == {1: 1.0, 2: 1.0}
    assert done.scored_count == 8
    assert seen[-1] == done


async def test_a_suite_that_does_not_exist_is_named(tmp_path):
    recipe = small_recipe(tmp_path, scorer="exact", changes=CHANGES)
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        await live_run(run)
        with pytest.raises(AstraflowError, match="held_out") as caught:
            await evaluate_live(run.run_dir, "x", versions={}, pool_share=None, note=lambda _: None)
    assert caught.value.reason is Reason.EVAL_UNKNOWN
