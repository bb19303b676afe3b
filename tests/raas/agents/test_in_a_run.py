"""A run whose rollouts are an agent's: hub, node, trainer and a program that speaks HTTP."""

import sys
from pathlib import Path

import pytest

from astraflow.testing import small_recipe, start_run

SORTER = Path(__file__).parents[3] / "recipes" / "agents" / "sorter.py"


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [0, 2])
async def test_a_run_is_trained_through_a_program(tmp_path, persistent):
    asker = Path(__file__).parents[2] / "workflows" / "agents" / "programs" / "asker.py"
    program = SORTER if persistent else asker
    recipe = small_recipe(
        tmp_path,
        workflow="command",
        scorer="exact",
        prompts=[{"prompt": f"{n} + {4 - n} = ", "answer": "4"} for n in range(5)],
        changes={
            "workflows.main.options": {
                "command": [sys.executable, "-I", "-S", str(program)],
                "persistent": persistent,
            }
        },
    )
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        await run.add_node(answer=lambda text: "4")
        run.add_trainer()
        await run.finish()
    rollouts = [each.rollout for each in run.rollouts()]
    assert {each.reward for each in rollouts} == {1.0}
    assert {int(each.trajectories[0].sampled_mask.sum()) for each in rollouts} == {1}
