"""A hub or a run that is killed goes on where it was, Ctrl-C drains it, and the books add up."""

import json
import random
import signal
import subprocess
from contextlib import suppress

import psutil
import pytest
from typer.testing import CliRunner

from astraflow.cli.main import app
from astraflow.config.run_dir import read_json_lines

from .conftest import astraflow, running, started

pytestmark = pytest.mark.e2e


def kill_hub(run):
    """Kill the hub with SIGKILL and wait for the next one."""
    (hub,) = [p for p in run.children("serve") if "dataflow" in p.cmdline()]
    hub.send_signal(signal.SIGKILL)
    psutil.wait_procs([hub], timeout=100)
    return hub.pid


def wait_for_another_hub(run, pid):
    while run.run_dir.read_endpoint().pid == pid:
        assert run.process.poll() is None, run.process.communicate()[0]
        with suppress(subprocess.TimeoutExpired):
            run.process.wait(0.05)


def kill_launcher(run):
    """Kill the launcher with SIGKILL: its hub ends at once; return all who end by themselves."""
    family = psutil.Process(run.process.pid).children(recursive=True)
    run.process.kill()
    run.process.communicate()
    hub = run.run_dir.read_endpoint().pid
    _, alive = psutil.wait_procs([process for process in family if process.pid == hub], 100)
    assert not alive
    return family


def test_a_run_whose_hub_and_launcher_are_killed_loses_nothing(tmp_path, cache):
    chance = random.Random(4)
    sets = (
        # It ends when the test has it end, however slow the test is.
        "policies.solver.trainer.step_count=100000",
        "policies.solver.trainer.checkpoint_every=50",
        "hub.session_ttl_s=2",
        "raas.count=1",
        "evals={}",
    )
    with started("sort.yaml", *sets, runs=tmp_path, cache=cache) as run:
        run.wait_for_steps(1)
        with pytest.raises(psutil.TimeoutExpired):
            psutil.Process(run.process.pid).wait(chance.uniform(0.01, 0.4))
        wait_for_another_hub(run, kill_hub(run))
        run.wait_for_steps(3)
        folder = run.run_dir
        # In this process: the run might be over before another had started.
        done = CliRunner().invoke(app, ["save", str(folder.root), "--id", "mine", "--json"])
        assert done.exit_code == 0, done.output
        (saved,) = json.loads(done.stdout)["policies"]
        run.wait_for_steps(saved["step"] + 1)
        family = kill_launcher(run)
    address = folder.read_endpoint().address
    recorded_count = len(read_json_lines(folder.metrics))
    resume = ("run", "--resume", str(folder.root), "--checkpoint", "mine")
    with running(*resume, run_dir=folder, cache=cache) as run:
        run.wait_for_steps(recorded_count + 3)
        assert run.run_dir.read_endpoint().address == address
        wait_for_another_hub(run, kill_hub(run))
        run.wait_for_steps(recorded_count + 6)
        left = psutil.Process(run.process.pid).children(recursive=True)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.output
    assert not [process for process in left if process.is_running()]
    assert run.summary["state"] == "stopped"
    steps = [row["step"] for row in read_json_lines(folder.metrics)]
    assert steps.count(saved["step"]) == 1
    assert steps.count(saved["step"] + 1) == 2
    assert run.output.count("it goes on where it was") == 1
    for account in run.books:
        assert account["balanced"]
        assert account["in_flight_count"] == account["waiting_count"] == 0
    done = astraflow("ledger", str(run.run_dir.root), "--json", cache=cache)
    assert done.returncode == 0, done.stdout + done.stderr
    ledger = json.loads(done.stdout)
    assert ledger["holds"]
    assert len(ledger["checks"]) == 4
    assert [a["trained_count"] for a in ledger["accounts"]] == [
        a["trained_count"] for a in run.books
    ]
    assert set(steps) == set(range(1, run.summary["steps"] + 1))
    _, alive = psutil.wait_procs(family, timeout=100)
    assert not alive
    done = f"policies.solver.trainer.step_count={run.summary['steps']}"
    again = astraflow("run", "--resume", str(run.run_dir.root), "--set", done, cache=cache)
    assert again.returncode == 1
    assert "go on with more of them" in again.stderr


@pytest.mark.long
@pytest.mark.skipif(not hasattr(psutil.Process, "rlimit"), reason="no limits of others here")
def test_a_full_disk_is_told_and_so_is_what_the_run_came_to(tmp_path, cache):
    sets = ("policies.solver.trainer.step_count=400", "raas.count=1", "evals={}")
    with started("sort.yaml", *sets, runs=tmp_path, cache=cache) as run:
        run.wait_for_steps(1)
        (hub,) = run.children("serve")
        psutil.Process(run.process.pid).rlimit(psutil.RLIMIT_FSIZE, (0, 0))
        hub.rlimit(psutil.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        assert run.wait() == 1
    said = " ".join(run.output.split())
    assert "journal.sqlite cannot be used" in said
    assert "what came of the run cannot be written" in said
    assert "rollouts trained on" in said
