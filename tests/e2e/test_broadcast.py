"""Real processes whose weights come by broadcast, until one of them is killed."""

import pytest

from astraflow.config.run_dir import read_json_lines
from crash_ends.postgres import free_port

from .by_hand import by_hand
from .conftest import WARM_UP

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def test_nodes_take_versions_by_broadcast_and_pull_when_one_is_killed(tmp_path, cache, nursery):
    with by_hand(
        "sort.yaml",
        WARM_UP,
        "policies.solver.trainer.groups_per_batch=4",
        "policies.solver.trainer.step_count=4000",
        f"policies.solver.trainer.broadcast={{node_count: 2, port: {free_port()}, deadline_s: 5}}",
        "evals={}",
        "raas.capacity=16",
        run_dir=tmp_path / "run",
        cache=cache,
        nursery=nursery,
    ) as run:

        def came(*, by_broadcast, after=0):
            """The nodes to which later versions came this way."""
            path = run.run_dir.versions
            rows = read_json_lines(path) if path.exists() else []
            return {
                row["member"]
                for row in rows
                if row["state"] == "live"
                and row["version"] > after
                and (row["sources"] == ["broadcast"]) is by_broadcast
            }

        run.start_trainer("solver")
        run.start_node(0)
        run.start_node(1)
        run.until(lambda: len(came(by_broadcast=True)) == 2)
        run.kill("raas-0")
        step = run.step("solver") + 1
        run.until(lambda: came(by_broadcast=False, after=step))
        run.until(lambda: run.step("solver") > step + 2)
        assert run.ledger()["holds"]
