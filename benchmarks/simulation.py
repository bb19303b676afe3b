"""A day of a large pool, and a day of changing demand, on simulated time.

Pool: three speeds (100, 60 and 30 %), a tenth of the nodes flap, half of these without a word; the
trainer asks for 95 % of what the pool can make. Bar: its wait within 5 percentage points of an
oracle's, equal nodes of the same total speed; every law holds; 24 h of 1,000 nodes in 5 minutes.

Demand: the trainer's pace changes five times; rollouts take 20 s, so that what the staleness of 8
allows is not what limits the fastest pace, 10 s per batch. Bar: three windows later the pool is
within one node of the ideal; trainers wait at most 3 % of the day; a tenth fewer node-hours than a
pool that is large enough for the peak.

    python benchmarks/simulation.py --nodes 1000 --hours 24 --json simulation.json
"""

import argparse
import json
import os
import time
from math import ceil
from pathlib import Path
from typing import Any, Final

from astraflow.simulate.scenario import Demand, Scenario, Trainer, ideal_count, oracle_of
from astraflow.simulate.simulation import SimulationReport, simulate
from astraflow.telemetry.garbage import collect_rarely

STEP_S: Final = 480.0
TOKENS: Final = 40000.0
WINDOW_S: Final = 600.0
COOLDOWN_S: Final = 60.0
HOUR_S: Final = 3600.0
PACES: Final = ((0, 40.0), (4, 16.0), (8, 10.0), (12, 30.0), (16, 13.0), (20, 50.0))


def large(nodes: int, hours: float) -> Scenario:
    """Return the pool of three speeds."""
    share = nodes // 3
    counts = (share, share, nodes - 2 * share)
    pools = {
        name: {
            "count": count,
            "slots": 8,
            "tokens_per_s": speed,
            "latency_s": latency_s,
            "flapping": {"share": 0.1},
        }
        for name, count, speed, latency_s in zip(
            ("fast", "medium", "slow"), counts, (50.0, 30.0, 15.0), (0.0, 0.15, 0.3), strict=True
        )
    }
    scenario = Scenario.model_validate(
        {"hours": hours, "rollouts": {"mean_tokens": TOKENS}, "pools": pools}
    )
    rate = sum(p.count * p.slots * p.tokens_per_s for p in scenario.pools.values()) / TOKENS
    groups = round(0.95 * rate * STEP_S / scenario.rollouts.group_size)
    trainer = Trainer(groups_per_batch=groups, max_staleness=8, demand=(Demand(step_s=STEP_S),))
    return scenario.model_copy(update={"trainer": trainer})


def changing(hours: float) -> Scenario:
    """Return the scenario of changing demand; all paces, within the hours given."""
    demand = [{"at_s": at * hours / 24 * HOUR_S, "step_s": step_s} for at, step_s in PACES]
    return Scenario.model_validate(
        {
            "hours": hours,
            "rollouts": {"mean_tokens": 2000.0},
            "trainer": {"groups_per_batch": 8, "max_staleness": 8, "demand": demand},
            "pools": {"pool": {"count": 8, "slots": 4, "tokens_per_s": 100, "join_s": 30}},
            "autoscale": {"max": 64, "window_s": WINDOW_S, "cooldown_s": COOLDOWN_S},
        }
    )


def fixed(scenario: Scenario) -> Scenario:
    """Return the same with a pool that is large enough for the peak."""
    peak = max(ideal_count(scenario, demand.step_s) for demand in scenario.trainer.demand)
    pool = scenario.pools["pool"].model_copy(update={"count": ceil(peak)})
    return scenario.model_copy(update={"autoscale": None, "pools": {"pool": pool}})


def measure_pool(nodes: int, hours: float) -> dict[str, Any]:
    """Simulate the large pool and its oracle."""
    scenario = large(nodes, hours)
    report, cpu_s = timed(scenario)
    oracle = simulate(oracle_of(scenario))
    return {
        "nodes": nodes,
        "hours": hours,
        "wall_s": report.wall_s,
        "cpu_s": cpu_s,
        "events": report.event_count,
        "rollouts": report.books.trained_count,
        "wait_fraction": report.wait_fraction,
        "oracle_wait_fraction": oracle.wait_fraction,
        "reissued": report.books.reissued_count,
        "broken_laws": {**report.broken_laws, **oracle.broken_laws},
    }


def measure_demand(hours: float) -> dict[str, Any]:
    """Simulate the changing demand, scaled and with a fixed pool."""
    scenario = changing(hours)
    report, still = simulate(scenario), simulate(fixed(scenario))
    settle_s = 3 * (WINDOW_S + COOLDOWN_S)
    rows = [
        {
            "at_h": demand.at_s / HOUR_S,
            "ideal": ceil(ideal_count(scenario, demand.step_s)),
            "nodes": report.size_at(demand.at_s + settle_s),
        }
        for demand in scenario.trainer.demand
    ]
    return {
        "steps": rows,
        "changes": len(report.scaling),
        "wait_fraction": report.wait_fraction,
        "node_hours": report.node_hours,
        "fixed_wait_fraction": still.wait_fraction,
        "fixed_node_hours": still.node_hours,
        "broken_laws": dict(report.broken_laws),
    }


def timed(scenario: Scenario) -> tuple[SimulationReport, float]:
    """Simulate; return the seconds of CPU as well."""
    began = time.process_time()
    report = simulate(scenario)
    return report, time.process_time() - began


def main() -> None:
    """Run both, print and write what came of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--hours", type=float, default=4.0, help="of the large pool")
    parser.add_argument("--demand-hours", type=float, default=24.0)
    parser.add_argument("--only", choices=("pool", "demand"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    collect_rarely()
    found: dict[str, Any] = {"load_average": os.getloadavg()}
    if options.only != "demand":
        found["pool"] = measure_pool(options.nodes, options.hours)
    if options.only != "pool":
        found["demand"] = measure_demand(options.demand_hours)
    print(json.dumps(found, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
