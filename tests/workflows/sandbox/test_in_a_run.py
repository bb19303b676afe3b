"""Programs of a policy in a whole run: they are rewarded, whatever they do."""

import pytest

from astraflow.core.rollouts import Outcome
from astraflow.testing import small_recipe, start_run

PROGRAMS = {
    "0": "print(input())",
    "1": "import time; time.sleep(600)",
    "2": "import os; os._exit(0)",
}


@pytest.mark.slow
async def test_a_program_that_hangs_or_leaves_is_a_reward_and_no_void_rollout(tmp_path):
    tests = {"inputs": ["x"], "outputs": ["x"]}
    recipe = small_recipe(
        tmp_path,
        workflow="single_turn",
        scorer="code",
        prompts=[{"prompt": str(number % 3), "tests": tests} for number in range(6)],
        changes={
            "policies.solver.sampling.max_new_tokens": 200,
            "workflows.main.scorer_options": {"time_s": 2.0},
        },
    )

    def answer(text):
        return f"```\n{PROGRAMS[text[-1]]}\n```"

    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        await run.add_node(answer=answer)
        run.add_trainer()
        await run.finish()
    rollouts = [record.rollout for record in run.rollouts()]
    assert {rollout.outcome for rollout in rollouts} == {Outcome.SCORED}
    assert {rollout.reward for rollout in rollouts} == {0.0, 1.0}
