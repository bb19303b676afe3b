"""Checkpoints measured without a run: what came of a suite, and why rollouts have no reward."""

from astraflow.core.errors import Reason
from astraflow.core.ids import PolicyId
from astraflow.launch.evaluate import _evaluate_set
from astraflow.raas.policies import ServedModel
from astraflow.testing import CharTokenizer, SmallEngine, small_recipe
from astraflow.workflows.building import build_workflows, close_workflows, workflow_specs
from astraflow.workflows.registry import scorer

SUITE = {"data_sets": [{"data_set": "train", "workflow": "main", "repeats": 2}]}


@scorer("reads_unit")
def _score(prompt, text):
    return float(prompt.fields["unit"] in text)


async def test_why_a_scorer_failed_is_told_once_with_the_line_of_the_user(tmp_path):
    rows = [{"prompt": "1"}, {"prompt": "2"}, {"prompt": "3", "unit": ""}]
    changes = {"evals": {"held_out": SUITE}}
    recipe = small_recipe(tmp_path, scorer="reads_unit", prompts=rows, changes=changes)
    engine = SmallEngine()
    engine.version = 0
    policy = PolicyId("solver")
    workflows = build_workflows(workflow_specs(recipe))
    told = []
    result = await _evaluate_set(
        recipe,
        recipe.evals["held_out"].data_sets[0],
        {policy: ServedModel(engine=engine, tokenizer=CharTokenizer())},
        workflows,
        sampling={policy: recipe.policies["solver"].sampling.params},
        note=told.append,
    )
    await close_workflows(workflows.values())
    await engine.close()
    assert (result.missing_count, result.mean_reward) == (4, 1.0)
    (failure,) = told
    assert failure.reason is Reason.SCORER_FAILED
    assert 'prompt.fields["unit"]' in failure.traceback
