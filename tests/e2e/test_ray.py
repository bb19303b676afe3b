"""A recipe on Ray: a real cluster of two nodes on this machine."""

import signal

import psutil
import pytest

from .conftest import started
from .places import members

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.ray]


@pytest.fixture(scope="module")
def address():
    """The address of a cluster."""
    made = pytest.importorskip("ray.cluster_utils", reason="pip install 'astraflow[ray]'")
    cluster = made.Cluster(initialize_head=True, head_node_args={"num_cpus": 3})
    cluster.add_node(num_cpus=3)
    yield cluster.address
    cluster.shutdown()


@pytest.fixture(autouse=True)
def _without_tokens(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")


def on(address, **options):
    said = "".join(f", {key}: {value}" for key, value in options.items())
    return f"executor={{name: ray, options: {{address: '{address}'{said}}}}}"


def test_a_killed_node_is_another_actor_and_none_is_left(tmp_path, cache, address):
    sets = ("policies.solver.trainer.step_count=24", on(address))
    with started("sort.yaml", *sets, runs=tmp_path, cache=cache) as run:
        run.wait_for_steps(2)
        (node,) = members(run, "join", "raas-0")
        assert "ASTRAFLOW_JOIN_TOKEN" in node.environ()
        node.send_signal(signal.SIGKILL)
        assert run.wait() == 0, run.output
    assert "raas-0 ended (-9); what it held is issued again" in run.output
    assert run.run_dir.log("raas-2").exists()
    assert all(account["balanced"] for account in run.books)
    assert not members(run)


def test_a_trainer_on_two_machines_goes_on_when_one_of_its_actors_is_killed(
    tmp_path, cache, address
):
    sets = (
        "policies.solver.trainer.ranks=2",
        "policies.solver.trainer.step_count=6",
        "policies.solver.trainer.checkpoint_every=2",
        on(address, ranks_per_node=1),
        "raas.count=1",
        "evals={}",
    )
    with started("sort.yaml", *sets, runs=tmp_path, cache=cache) as run:
        run.wait_for_steps(3)
        trainers = [each for each in members(run, "trainer") if "RANK" not in each.environ()]
        assert len(trainers) == 2
        actor = trainers[0].parent()
        assert actor is not None
        actor.kill()
        psutil.wait_procs(trainers, timeout=100)
        assert run.wait() == 0, run.output
    assert run.output.count("it goes on from its last") == 1
    assert all(account["balanced"] for account in run.books)
    assert not members(run)
