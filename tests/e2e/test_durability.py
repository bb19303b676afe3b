"""A hub that is killed goes on where it was, and the books add up."""

import json
import random
import signal
import subprocess
from contextlib import suppress

import psutil
import pytest

from astraflow.config.run_dir import read_json_lines

from .conftest import astraflow, started

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


def kill_hub(run):
    """Kill the hub with SIGKILL and wait for the next one."""
    (hub,) = [p for p in run.children("serve") if "dataflow" in p.cmdline()]
    hub.send_signal(signal.SIGKILL)
    psutil.wait_procs([hub], timeout=10)
    return hub.pid


def wait_for_another_hub(run, pid):
    while run.run_dir.read_endpoint().pid == pid:
        assert run.process.poll() is None, run.process.communicate()[0]
        with suppress(subprocess.TimeoutExpired):
            run.process.wait(0.05)


def test_a_hub_killed_three_times_loses_nothing(tmp_path, cache):
    chance = random.Random(4)
    with started(
        "sort.yaml", "policies.solver.trainer.step_count=12", runs=tmp_path, cache=cache
    ) as run:
        for steps in (1, 4, 8):
            run.wait_for_steps(steps)
            with pytest.raises(psutil.TimeoutExpired):
                psutil.Process(run.process.pid).wait(chance.uniform(0.01, 0.4))
            wait_for_another_hub(run, kill_hub(run))
        code = run.wait()
    assert code == 0, run.output
    assert run.summary["steps"] == 12
    assert run.output.count("it goes on where it was") == 3
    for account in run.books:
        assert account["balanced"]
        assert account["in_flight_count"] == account["waiting_count"] == 0
    done = astraflow("ledger", str(run.run_dir.root), "--json", cache=cache)
    assert done.returncode == 0, done.stdout + done.stderr
    ledger = json.loads(done.stdout)
    assert ledger["holds"]
    assert len(ledger["checks"]) == 3
    assert [a["trained_count"] for a in ledger["accounts"]] == [
        a["trained_count"] for a in run.books
    ]
    steps = [row["step"] for row in read_json_lines(run.run_dir.metrics)]
    assert steps == list(range(1, 13))
