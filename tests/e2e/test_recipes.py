"""Every recipe that trains on two cores, shortened: whole runs whose books add up."""

import pytest

from astraflow.config.run_dir import RunDir

from .conftest import ROOT, running

pytestmark = pytest.mark.e2e

# ruff: noqa: E501
# fmt: off
# By folder: what makes cpu.yaml short, and spares it models that are downloaded.
SHORT = {
    "alfworld": [
        "policies.player.model.warm_up.step_count=10",
        "policies.player.trainer.step_count=3",
        "policies.player.trainer.optimizer.decay=null",
        "rollouts.filters=[]",
        "data.held_out.limit=8",
    ],
    "code": [
        "policies.coder.model.warm_up.step_count=10",
        "policies.coder.trainer.step_count=2",
        "policies.coder.trainer.groups_per_batch=4",
        "policies.coder.trainer.optimizer.decay=null",
        "data.held_out.limit=8",
    ],
    "code-multi-agent": [
        "policies.coder.model.warm_up.step_count=10",
        "policies.coder.trainer.step_count=2",
        "policies.coder.trainer.groups_per_batch=4",
        "policies.coder.trainer.optimizer.decay=null",
        "policies.tester.model.warm_up.step_count=10",
        "policies.tester.trainer.step_count=2",
        "policies.tester.trainer.groups_per_batch=4",
        "policies.tester.trainer.optimizer.decay=null",
        "data.held_out.limit=8",
    ],
    "math": [
        "policies.solver.model={tiny: {}, warm_up: {demonstrations: ../tools/demonstrations.jsonl, step_count: 2, batch_size: 4}}",
        "policies.solver.trainer.step_count=2",
        "policies.solver.trainer.optimizer.decay=null",
        "data.held_out.limit=8",
    ],
    "math-efficient-data": [
        "policies.solver.model.warm_up.step_count=10",
        "policies.solver.trainer.step_count=2",
        # So early no group is right and wrong at once.
        "rollouts.filters=[]",
        "evals.held_out.every=null",
        "data.held_out.limit=8",
    ],
    "math-multi-agent": [
        "policies.solver.model.warm_up.step_count=10",
        "policies.solver.trainer.step_count=2",
        "policies.solver.trainer.optimizer.decay=null",
        "policies.verifier.model.warm_up.step_count=10",
        "policies.verifier.trainer.step_count=2",
        "policies.verifier.trainer.optimizer.decay=null",
        "evals.held_out.every=null",
        "data.held_out.limit=8",
    ],
    "search": [
        "policies.reader.model={tiny: {context: 512}, warm_up: {demonstrations: ../tools/demonstrations.jsonl, step_count: 2, batch_size: 4}}",
        "policies.reader.trainer.step_count=2",
        "policies.reader.trainer.optimizer.decay=null",
        "data.held_out.limit=8",
    ],
    "terminal": [
        "policies.agent.model.warm_up.step_count=10",
        "policies.agent.trainer.step_count=2",
        "policies.agent.trainer.groups_per_batch=2",
        "policies.agent.trainer.optimizer.decay=null",
        "data.held_out.limit=4",
    ],
    "textcraft": [
        "policies.crafter.model.warm_up.step_count=10",
        "policies.crafter.trainer.step_count=3",
        "policies.crafter.trainer.optimizer.decay=null",
        "rollouts.filters=[]",
        "data.held_out.limit=8",
    ],
    "tools": [
        "policies.clerk.model={tiny: {}, warm_up: {demonstrations: demonstrations.jsonl, step_count: 20, batch_size: 8}}",
        "policies.clerk.trainer.step_count=3",
        "policies.clerk.trainer.optimizer.decay=null",
        "data.held_out.limit=8",
    ],
    "webshop": [
        "policies.shopper.model.warm_up.step_count=10",
        "policies.shopper.trainer.step_count=2",
        "policies.shopper.trainer.groups_per_batch=4",
        "policies.shopper.trainer.optimizer.decay=null",
        "data.held_out.seeds=[100000, 100004]",
    ],
}
# fmt: on


# Two policies, two programs in sandboxes: the widest of them stands for all in `make test`.
WIDEST = "code-multi-agent"


@pytest.mark.parametrize(
    "name",
    [name if name == WIDEST else pytest.param(name, marks=pytest.mark.long) for name in SHORT],
)
def test_a_shortened_recipe_trains(name, tmp_path, cache, monkeypatch):
    monkeypatch.chdir(ROOT)
    sets = [part for override in SHORT[name] for part in ("--set", override)]
    arguments = ("run", f"recipes/{name}/cpu.yaml", "--runs", str(tmp_path), "--name", name, *sets)
    with running(*arguments, run_dir=RunDir(tmp_path / name), cache=cache) as run:
        code = run.wait()
    assert code == 0, run.output
    assert run.summary["state"] == "done"
    assert run.summary["accuracy_before"] is not None
    assert run.summary["accuracy_after"] is not None
    assert all(account["balanced"] for account in run.books)
