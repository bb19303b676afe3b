"""Bad input: one clear line, a non-zero exit code, nothing left running."""

import socket

import pytest

from astraflow.launch.processes import RoleCommand

from .by_hand import by_hand
from .conftest import ROOT, WARM_UP, astraflow, started

pytestmark = pytest.mark.e2e
SORT = str(ROOT / "recipes" / "sort.yaml")


def test_an_unknown_key_names_the_nearest(tmp_path, cache):
    done = astraflow("run", SORT, "--set", "policies.solver.trainer.stepcount=3", cache=cache)
    assert done.returncode == 2
    assert "stepcount" in done.stderr
    assert "step_count" in done.stderr


def test_a_model_that_is_not_there_is_named(tmp_path, cache):
    done = astraflow(
        *("run", SORT, "--runs", str(tmp_path)),
        *("--set", "policies.solver.model={path: /no/such/model}"),
        cache=cache,
    )
    assert done.returncode == 2
    assert "/no/such/model is not a directory" in done.stdout + done.stderr


def test_a_port_in_use_is_named(tmp_path, cache):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        done = astraflow(
            *("dataflow", "serve", SORT, "--listen", address, "--run-dir", str(tmp_path)),
            cache=cache,
        )
    assert done.returncode == 1
    assert address in done.stderr


def test_a_wrong_token_is_refused(tmp_path, cache, nursery):
    with by_hand(
        "sort.yaml", WARM_UP, run_dir=tmp_path / "run", cache=cache, nursery=nursery
    ) as run:
        log, model = tmp_path / "log", f"solver={run.roles.models['solver']}"
        join = ("raas", "join", SORT, "--hub", run.address, "--token", "wrong", "--model", model)
        run.start(RoleCommand(name="stranger", arguments=join, log=log))
        assert run.wait("stranger") == 1
    assert "TOKEN_INVALID" in log.read_text()


@pytest.mark.long
def test_nothing_trains_on_a_loss_that_is_not_a_number(tmp_path, cache):
    with started(
        "sort.yaml",
        "policies.solver.trainer.optimizer.learning_rate=1e30",
        runs=tmp_path,
        cache=cache,
    ) as run:
        code = run.wait()
    assert code == 1
    assert "not finite" in run.output
