"""Nodes that leave, die and stand still; trainers that stand still."""

import asyncio
import signal
import time

import psutil
import pytest

from astraflow.launch.operations import drain_member

from .by_hand import by_hand
from .conftest import WARM_UP

pytestmark = pytest.mark.e2e

SMALL = (
    WARM_UP,
    "policies.solver.trainer.step_count=400",
    "policies.solver.trainer.groups_per_batch=8",
    "evals={}",
    "hub.session_ttl_s=2",
)


def member(run, name):
    return next((m for m in run.status().members if m.name == name), None)


def test_nodes_drain_die_and_stand_still_and_nothing_is_lost(tmp_path, cache, nursery):
    with by_hand(
        "sort.yaml", *SMALL, run_dir=tmp_path / "run", cache=cache, nursery=nursery
    ) as run:
        run.start_trainer("solver")
        for index in range(3):
            run.start_node(index)
        run.until(lambda: run.step("solver") >= 2)
        run.until(lambda: all(member(run, f"raas-{n}") for n in range(3)))

        run.kill("raas-0", signal.SIGTERM)
        assert run.wait("raas-0") == 0
        assert member(run, "raas-0") is None

        run.kill("raas-1")
        run.until(lambda: member(run, "raas-1") is None)
        step = run.step("solver")
        run.until(lambda: run.step("solver") > step)

        run.kill("raas-2", signal.SIGSTOP)
        run.until(lambda: member(run, "raas-2") is None)
        run.kill("raas-2", signal.SIGCONT)
        run.until(lambda: run.step("solver") > step + 3)
        ledger = run.ledger()
    assert ledger["holds"]
    (account,) = ledger["accounts"]
    assert not [drop for drop in account["drops"] if drop["reason"] != "STALE"]


@pytest.mark.long
def test_a_trainer_that_stands_still_stops_the_pool(tmp_path, cache, nursery):
    with by_hand(
        "sort.yaml", *SMALL, run_dir=tmp_path / "run", cache=cache, nursery=nursery
    ) as run:
        run.start_trainer("solver")
        run.start_node(0)
        run.until(lambda: run.step("solver") >= 2)
        run.kill("trainer-solver", signal.SIGSTOP)

        def bounded():
            (policy,) = run.status().policies
            assert policy.open_group_count <= policy.max_open_group_count
            return policy.open_group_count == policy.max_open_group_count

        run.until(bounded)
        hub = psutil.Process(run.processes["hub"])
        before, deadline = hub.memory_info().rss, time.monotonic() + 3
        run.until(lambda: time.monotonic() > deadline)
        assert bounded()
        grown = hub.memory_info().rss - before
        run.kill("trainer-solver", signal.SIGCONT)
        step = run.step("solver")
        run.until(lambda: run.step("solver") > step + 3)
        asyncio.run(drain_member(run.run_dir, "raas-0", grace_s=None))
        assert run.wait("raas-0") == 0
        ledger = run.ledger()
    assert ledger["holds"]
    assert grown < 32 << 20
