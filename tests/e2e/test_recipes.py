"""Every recipe that trains on two cores, shortened: whole runs whose books add up."""

import pytest

from astraflow.config.run_dir import RunDir

from .conftest import ROOT, running

pytestmark = pytest.mark.e2e

# fmt: off
# By folder: what makes cpu.yaml short, and spares it models that are downloaded.
SHORT = {
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
}
# fmt: on


@pytest.mark.parametrize("name", SHORT)
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
