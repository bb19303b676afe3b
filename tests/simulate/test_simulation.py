"""Small scenarios: the laws hold, reports repeat, and placement and scaling do their work."""

from itertools import repeat
from math import ceil

import pytest

from astraflow.core.effects import SendCancellation
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tasks import CancelReason
from astraflow.simulate.hub import SimulatedHub, Timeline
from astraflow.simulate.node import SimulatedNode
from astraflow.simulate.scenario import Pool, Scenario, ideal_count, oracle_of
from astraflow.simulate.simulation import settings_of, simulate
from astraflow.simulate.trainer import SimulatedTrainer

SMALL = {
    "hours": 0.5,
    "rollouts": {"group_size": 4, "mean_tokens": 2000},
    "trainer": {"groups_per_batch": 4, "demand": [{"step_s": 30}]},
    "pools": {
        "fast": {"count": 2, "slots": 4},
        "slow": {"count": 2, "slots": 4, "tokens_per_s": 20, "latency_s": 0.3},
    },
}


def scenario(**changes):
    return Scenario.model_validate({**SMALL, **changes})


def test_the_same_scenario_gives_the_same_report():
    first, second = (simulate(scenario(hours=0.2)).to_json() for _ in range(2))
    first.pop("wall_s"), second.pop("wall_s")
    assert first == second


def test_the_laws_hold_while_nodes_flap():
    flapping = {"share": 1.0, "up_s": 200, "down_s": 60, "crash_share": 0.7}
    report = simulate(scenario(pools={"only": {"count": 4, "slots": 4, "flapping": flapping}}))
    assert report.crash_count
    assert report.leave_count
    assert report.books.reissued_count
    assert report.books.is_balanced
    assert not report.broken_laws


def test_a_node_that_leaves_before_it_has_joined_costs_nothing_any_more():
    flapping = {"share": 1.0, "up_s": 60, "down_s": 60, "crash_share": 0.0}
    pool = {"count": 2, "slots": 4, "join_s": 300, "flapping": flapping}
    report = simulate(scenario(pools={"only": pool}))
    assert report.leave_count > 2
    assert max(count for _, count in report.sizes) <= 2


def test_rollouts_that_take_longer_than_their_timeout_fail():
    rollouts = {"group_size": 4, "mean_tokens": 2000, "spread": 0, "timeout_s": 50}
    # 40 s on a fast node, 100 s on a slow one.
    report = simulate(scenario(rollouts=rollouts))
    assert {drop.reason for drop in report.books.drops} >= {Reason.ROLLOUT_TIMEOUT}
    assert report.step_count
    assert not report.broken_laws
    nobody = simulate(scenario(rollouts=rollouts | {"timeout_s": 10}))
    assert nobody.step_count == 0
    assert "ROLLOUT_TIMEOUT" in nobody.failure


def test_nodes_that_come_to_a_run_that_has_failed_are_gone():
    flapping = {"share": 1.0, "up_s": 60, "down_s": 60, "crash_share": 0.0}
    rollouts = {"group_size": 4, "mean_tokens": 2000, "spread": 0, "timeout_s": 10}
    pools = {"steady": {"count": 2}, "only": {"count": 2, "flapping": flapping}}
    report = simulate(scenario(rollouts=rollouts, pools=pools))
    assert "ROLLOUT_TIMEOUT" in report.failure
    assert report.sizes[-1][1] == 0
    assert not report.broken_laws


def test_a_task_that_is_withdrawn_gives_its_slot_back():
    described = scenario(rollouts={"group_size": 1}, trainer={"groups_per_batch": 4})
    hub = SimulatedHub(timeline=Timeline(), settings=settings_of(described))
    SimulatedTrainer(scenario=described, hub=hub).start()
    # 20 s each, one at a time, from second 2 on.
    pool = Pool(slots=1, queue=3, tokens_per_s=50)
    node = SimulatedNode(name="node", pool=pool, hub=hub, lengths=repeat(1000.0))
    node.join()
    hub.timeline.run_until(3)
    withdrawn = SendCancellation(
        member_id=node.member_id, task_id=min(hub.run.open_task_ids), reason=CancelReason.STALE
    )
    node.cancel(withdrawn)
    hub.timeline.run_until(24)
    assert len(hub.run.rollouts()) == 1


def test_an_oracle_of_no_nodes_is_refused():
    with pytest.raises(AstraflowError, match="there are none"):
        oracle_of(scenario(pools={"pool": {"count": 0}}, autoscale={}))


def test_unlike_nodes_do_about_as_well_as_like_ones():
    unlike = simulate(scenario())
    oracle = simulate(oracle_of(scenario()))
    assert unlike.wait_fraction <= oracle.wait_fraction + 0.05


def test_a_slow_trainer_stops_the_pool():
    slow = {"groups_per_batch": 4, "max_staleness": 1, "demand": [{"step_s": 600}]}
    report = simulate(scenario(trainer=slow))
    assert report.books.issued_count <= (report.step_count + 3) * 16
    assert not report.broken_laws


def test_nothing_turns_stale_while_the_pool_has_time():
    """A task waits at its node until the version is live that it asks for."""
    slow = {"groups_per_batch": 4, "max_staleness": 4, "demand": [{"step_s": 120}]}
    report = simulate(scenario(trainer=slow, pools={"pool": {"count": 4, "slots": 4}}))
    assert not report.books.drops


@pytest.mark.slow
def test_scaling_follows_demand():
    demand = [
        {"at_s": 0, "step_s": 60},
        {"at_s": 7200, "step_s": 15},
        {"at_s": 14400, "step_s": 40},
    ]
    described = scenario(
        hours=6,
        trainer={"groups_per_batch": 4, "max_staleness": 8, "demand": demand},
        pools={"pool": {"count": 2, "slots": 4, "queue": 4, "join_s": 30}},
        autoscale={"max": 40, "window_s": 300, "cooldown_s": 60},
    )
    report = simulate(described)
    for begin, step_s in ((0, 60), (7200, 15), (14400, 40)):
        ideal = ceil(ideal_count(described, step_s))
        settled = report.size_at(begin + 3 * 360 + 60)
        assert abs(settled - ideal) <= 1, (step_s, ideal, settled)
    assert not report.broken_laws
