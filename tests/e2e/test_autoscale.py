"""A pool of real processes that grows and shrinks without losing work."""

import json
import signal

import pytest

from astraflow.launch.processes import RoleCommand

from .by_hand import by_hand
from .conftest import WARM_UP, astraflow

pytestmark = [pytest.mark.e2e, pytest.mark.long]

SMALL = (
    WARM_UP,
    "policies.solver.trainer.step_count=4000",
    "policies.solver.trainer.groups_per_batch=8",
    "evals={}",
    "raas.count=1",
    "autoscale.min=3",
    "autoscale.max=3",
)


def live_nodes(run):
    nodes = [m for m in run.status().members if m.name != "trainer" and m.role == "raas"]
    return [node for node in nodes if node.state == "live"]


def test_one_node_becomes_three_and_one_again_and_nothing_is_lost(tmp_path, cache, nursery):
    with by_hand(
        "sort.yaml", *SMALL, run_dir=tmp_path / "run", cache=cache, nursery=nursery
    ) as run:
        run.start_trainer("solver")
        run.start_node(0)
        run.until(lambda: run.step("solver") >= 1)
        folder = str(run.run_dir.root)
        advice = json.loads(
            astraflow("autoscale", folder, "--advise", "--json", cache=cache).stdout
        )
        assert (advice["action"], advice["target_member_count"]) == ("grow", 3)
        run.start(
            RoleCommand(
                name="autoscale",
                arguments=("autoscale", folder, "--poll", "0.5", "--json"),
                log=run.run_dir.log("autoscale"),
            )
        )
        run.until(lambda: len(live_nodes(run)) == 3)
        run.until(lambda: all(node.accepted_count for node in live_nodes(run)))
        run.kill("autoscale", signal.SIGTERM)
        assert run.wait("autoscale") == 0
        assert [node.name for node in live_nodes(run)] == ["raas-0"]
        step = run.step("solver")
        run.until(lambda: run.step("solver") > step + 1)
        ledger = run.ledger()
    assert ledger["holds"]
    (account,) = ledger["accounts"]
    assert not [drop for drop in account["drops"] if drop["reason"] != "STALE"]
