"""The main job, through real processes."""

import json
import signal
import subprocess
from contextlib import suppress

import psutil
import pytest

from astraflow.config.run_dir import read_json_lines

from .conftest import astraflow, started

pytestmark = pytest.mark.e2e


def test_a_run_trains_and_leaves_everything_it_promises(trained):
    run, _ = trained
    summary = run.summary
    assert summary["state"] == "done"
    assert summary["steps"] == 8
    # A row that has become stale is dropped at the lease, and its group goes on without it.
    assert 7 * 16 * 8 < summary["rollouts"] <= 8 * 16 * 8
    assert summary["versions"] == 9
    assert summary["accuracy_before"] is not None
    assert summary["accuracy_after"] is not None
    assert summary["weights_nbytes"]["solver"] > 0
    assert summary["policies"]["solver"]["staleness_max"] <= 2
    for account in run.books:
        assert account["balanced"]
        assert account["trained_count"] == summary["rollouts"]
    names = {path.name for path in run.run_dir.root.iterdir()}
    promised = {"recipe.yaml", "metrics.jsonl", "rollouts", "checkpoints", "logs", "reward.png"}
    assert promised <= names
    assert (run.run_dir.checkpoint("solver", 8) / "config.json").exists()
    everything = [run.run_dir.root, *run.run_dir.root.rglob("*")]
    open_to_others = [path for path in everything if path.lstat().st_mode & 0o077]
    assert [path for path in open_to_others if not path.is_symlink()] == []
    live = [json.loads(line) for line in run.run_dir.versions.read_text().splitlines()]
    assert {row["version"] for row in live if row["member"]} >= {0, 8}


@pytest.mark.long
def test_a_killed_node_costs_its_own_work_only(tmp_path, cache):
    with started(
        "sort.yaml", "policies.solver.trainer.step_count=24", runs=tmp_path, cache=cache
    ) as run:
        run.wait_for_steps(4)
        node = run.children("join")[0]
        node.send_signal(signal.SIGKILL)
        code = run.wait()
    assert code == 0, run.output
    assert run.summary["steps"] == 24
    assert all(account["balanced"] for account in run.books)


@pytest.mark.long
def test_each_process_sees_the_gpus_that_it_was_planned_and_who_follows_it_the_same(
    tmp_path, cache
):
    with started(
        "sort.yaml",
        "policies.solver.trainer.step_count=24",
        "gpus.count=4",
        runs=tmp_path,
        cache=cache,
    ) as run:
        run.wait_for_steps(2)
        (hub,), (trainer,) = run.children("dataflow"), run.children("trainer")
        nodes = {gpus_of(node): node for node in run.children("join")}
        assert (gpus_of(hub), gpus_of(trainer), sorted(nodes)) == ("", "0", ["1", "2"])
        nodes["1"].send_signal(signal.SIGKILL)
        psutil.wait_procs([nodes["1"]], timeout=100)
        while len(run.children("join")) < 2:
            assert run.is_alive, run.wait()
        assert sorted(map(gpus_of, run.children("join"))) == ["1", "2"]
        assert run.wait() == 0, run.output
    assert "GPUs: 4, apart, 1 idle" in run.output


def gpus_of(process: psutil.Process) -> str:
    return process.environ()["CUDA_VISIBLE_DEVICES"]


@pytest.mark.long
def test_ctrl_c_ends_a_warm_up_and_leaves_nothing_running(tmp_path):
    with started("sort.yaml", runs=tmp_path, cache=tmp_path / "cold") as run:
        while not run.run_dir.log("warm-up-solver").exists():
            with suppress(subprocess.TimeoutExpired):
                run.process.wait(0.05)
                raise AssertionError(run.process.communicate()[0])
        family = psutil.Process(run.process.pid).children(recursive=True)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.output
    assert "the run has not begun" in run.output
    assert run.summary["state"] == "stopped"
    assert not [process for process in family if process.is_running()]


@pytest.mark.long
def test_ctrl_c_drains_and_leaves_nothing_running_and_the_run_goes_on(tmp_path, cache):
    with started(
        "sort.yaml", "policies.solver.trainer.step_count=400", runs=tmp_path, cache=cache
    ) as run:
        run.wait_for_steps(3)
        family = psutil.Process(run.process.pid).children(recursive=True)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.output
    assert run.summary["state"] == "stopped"
    assert all(account["balanced"] for account in run.books)
    assert not [process for process in family if process.is_running()]
    count = run.summary["steps"] + 2
    more = ("--set", f"policies.solver.trainer.step_count={count}")
    done = astraflow("run", "--resume", str(run.run_dir.root), *more, cache=cache)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (run.summary["state"], run.summary["steps"]) == ("done", count)
    assert all(account["balanced"] for account in run.books)
    assert [row["step"] for row in read_json_lines(run.run_dir.metrics)] == [*range(1, count + 1)]


@pytest.mark.long
def test_a_drain_ends_with_the_last_node(tmp_path, cache):
    overrides = ("raas.count=1", "policies.solver.trainer.step_count=400")
    with started("sort.yaml", *overrides, runs=tmp_path, cache=cache) as run:
        run.wait_for_steps(2)
        node = run.children("join")[0]
        node.suspend()  # what it holds stays open, so the drain cannot end
        run.process.send_signal(signal.SIGINT)
        run.wait_for_log("hub", "state=stopping")
        node.kill()
        assert run.wait() == 130, run.output
    assert "no node is left" in run.output
    assert run.summary["state"] == "stopped"


@pytest.mark.long
def test_a_killed_launcher_leaves_no_orphan(tmp_path, cache):
    with started(
        "sort.yaml",
        "policies.solver.trainer.step_count=400",
        runs=tmp_path,
        cache=cache,
    ) as run:
        run.wait_for_steps(1)
        family = psutil.Process(run.process.pid).children(recursive=True)
        run.process.kill()
        run.process.wait()
    _, alive = psutil.wait_procs(family, timeout=100)
    assert not alive
