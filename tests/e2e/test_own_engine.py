"""An engine that a recipe names is started, started again and reported as the built-in one."""

import pytest

from astraflow.config.run_dir import read_json_lines

from .conftest import started
from .test_trainer_restart import kill_trainer

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def test_it_goes_on_from_its_checkpoint_when_it_is_killed(tmp_path, cache):
    with started(
        "sort.yaml",
        "policies.solver.trainer.engine=astraflow.trainers.torch_engine:TorchEngine",
        "policies.solver.trainer.checkpoint_every=1",
        "policies.solver.trainer.step_count=4",
        "raas.count=1",
        "hub.session_ttl_s=1",
        "evals={}",
        runs=tmp_path,
        cache=cache,
    ) as run:
        run.wait_for_steps(2)
        kill_trainer(run)
        code = run.wait()
    assert code == 0, run.output
    assert run.output.count("it goes on from its last") == 1
    assert max(row["step"] for row in read_json_lines(run.run_dir.metrics)) == 4
    (books,) = run.books
    assert books["balanced"]
