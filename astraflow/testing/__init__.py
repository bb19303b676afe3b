"""A whole run in one process, for tests of workflows, scorers, trainers and engines.

The hub, the nodes, the wire between them and the weights on it are the real ones; only the
engine is a small one that needs no model and no torch. Faults are switches.

Example: a test of a workflow.

    async def test_polite_answers_are_rewarded(tmp_path):
        recipe = small_recipe(tmp_path, workflow="my_workflows:Polite", prompts=[{"prompt": "hi"}])
        async with start_run(recipe, run_dir=tmp_path / "run") as run:
            await run.add_node(answer=lambda text: "with pleasure")
            run.add_trainer()
            assert (await run.finish()).failure is None
        assert {record.rollout.reward for record in run.rollouts()} == {1.0}
"""

from astraflow.testing.engine import CharTokenizer, SmallEngine
from astraflow.testing.line import Line
from astraflow.testing.nodes import LiveNode
from astraflow.testing.recipes import one_turn, small_recipe
from astraflow.testing.run import JOIN_TOKEN, OPERATOR_TOKEN, LiveRun, start_run
from astraflow.testing.train_engine import require_train_engine
from astraflow.testing.trainer import Trained, train_counter

__all__ = [
    "JOIN_TOKEN",
    "OPERATOR_TOKEN",
    "CharTokenizer",
    "Line",
    "LiveNode",
    "LiveRun",
    "SmallEngine",
    "Trained",
    "one_turn",
    "require_train_engine",
    "small_recipe",
    "start_run",
    "train_counter",
]
