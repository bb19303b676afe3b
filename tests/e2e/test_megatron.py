"""A run that Megatron trains goes as one of the built-in trainer; runs where it is installed."""

import importlib.util

import pytest

from astraflow.config.run_dir import read_json_lines

from .conftest import started

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.megatron,
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None,
        reason="needs astraflow[megatron]",
    ),
]
STEPS = 5


def losses(engine, runs, cache):
    sets = (
        f"policies.solver.trainer.engine={engine}",
        f"policies.solver.trainer.step_count={STEPS}",
        "policies.solver.trainer.max_staleness=0",
        "policies.solver.trainer.prefetch=1",
        "raas.count=1",
        "evals={}",
    )
    with started("sort.yaml", *sets, runs=runs, cache=cache, name=engine.rpartition(":")[2]) as run:
        assert run.wait(timeout=280) == 0, run.output
    steps = read_json_lines(run.run_dir.metrics)
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    assert all(row["mismatch/same_weights_abs_max"] < 0.05 for row in steps[:1])
    return [row["train/loss"] for row in steps]


def test_the_curve_is_that_of_the_built_in_trainer(tmp_path, cache):
    ours = losses("astraflow.trainers.megatron.engine:MegatronEngine", tmp_path, cache)
    theirs = losses("astraflow.trainers.torch_engine:TorchEngine", tmp_path, cache)
    assert ours == pytest.approx(theirs, abs=1e-6)
