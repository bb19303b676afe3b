"""A trainer that is killed goes on from its last checkpoint, and the books go back to it."""

import json
import signal
from pathlib import Path

import psutil
import pytest

from astraflow.config.run_dir import read_json_lines

from .conftest import astraflow, started

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def kill_trainer(run, number=signal.SIGKILL):
    (trainer,) = [p for p in run.children("trainer") if "--policy" in p.cmdline()]
    trainer.send_signal(number)
    psutil.wait_procs([trainer], timeout=100)


def test_a_trainer_killed_twice_reaches_the_last_step(tmp_path, cache):
    with started(
        "sort.yaml",
        "policies.solver.trainer.step_count=12",
        "policies.solver.trainer.checkpoint_every=3",
        "hub.session_ttl_s=1",
        "evals={}",
        runs=tmp_path,
        cache=cache,
    ) as run:
        for steps in (2, 8):
            run.wait_for_steps(steps)
            kill_trainer(run)
        code = run.wait()
    assert code == 0, run.output
    assert run.output.count("it goes on from its last") == 2
    assert max(row["step"] for row in read_json_lines(run.run_dir.metrics)) == 12
    (books,) = run.books
    assert books["balanced"]
    done = astraflow("ledger", str(run.run_dir.root), "--json", cache=cache)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["holds"]
    state = json.loads((run.run_dir.checkpoint("solver", 12) / "trainer_state.json").read_text())
    # Two publications more than steps: the restored ones. Lost steps had versions, too.
    assert state["version"] >= 14


def test_members_that_are_asked_to_leave_are_followed_by_a_trainer_and_told(tmp_path, cache):
    sets = ("policies.solver.trainer.step_count=9", "hub.session_ttl_s=1", "evals={}")
    with started("sort.yaml", *sets, runs=tmp_path, cache=cache) as run:
        run.wait_for_steps(2)
        kill_trainer(run, signal.SIGTERM)
        (node,) = [p for p in run.children("raas") if "raas-0" in p.cmdline()]
        node.send_signal(signal.SIGTERM)
        assert run.wait() == 0, run.output
    assert run.output.count("the trainer of solver has left; it goes on from its last") == 1
    assert run.output.count("has left; the others go on") == 1
    assert max(row["step"] for row in read_json_lines(run.run_dir.metrics)) == 9
    assert all(each["balanced"] for each in run.books)


def test_a_node_that_is_killed_in_the_last_evaluation_is_followed_by_one(tmp_path, cache):
    with started(
        "sort.yaml",
        "policies.solver.trainer.step_count=3",
        "evals.held_out.at_start=false",
        "raas.count=1",
        "raas.engine.max_batch=1",
        "hub.session_ttl_s=1",
        runs=tmp_path,
        cache=cache,
    ) as run:
        run.wait_for_steps(1)
        run.wait_for_log("trainer-solver", "the last version is served on")
        (node,) = run.children("join")
        node.send_signal(signal.SIGKILL)
        assert run.wait() == 0, run.output
    assert "what it held is issued again" in run.output
    assert run.summary["accuracy_after"] is not None


def test_a_last_checkpoint_takes_as_long_as_it_takes(tmp_path, cache, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    is_written = tmp_path / "is-written"
    monkeypatch.setenv("SLOW_DISK_UNTIL", str(is_written))
    with started(
        "sort.yaml",
        "policies.solver.trainer.engine=slow_disk:SlowDisk",
        "policies.solver.trainer.step_count=null",
        "data.train.limit=32",
        "rollouts.epochs=1",
        "raas.count=1",
        "evals={}",
        runs=tmp_path,
        cache=cache,
    ) as run:
        line = ""
        while "not written yet" not in line:
            line = run.process.stdout.readline()
            assert line, "the run ended without its last checkpoint"
        is_written.touch()
        assert run.wait() == 0, run.output
    (_, last) = sorted(run.run_dir.checkpoints("solver").iterdir())
    assert last.name == f"step_{run.summary['steps']:06d}"


def final_metrics(run):
    """Return of every step the last line, as far as training alone decides it."""
    compared = ("train/", "reward/", "advantage/", "group/", "response/", "batch/")
    return {
        row["step"]: {name: value for name, value in row.items() if name.startswith(compared)}
        for row in read_json_lines(run.run_dir.metrics)
    }


def test_a_trainer_killed_at_no_staleness_makes_the_curve_that_it_would_have_made(tmp_path, cache):
    sets = (
        "policies.solver.trainer.step_count=7",
        "policies.solver.trainer.checkpoint_every=2",
        "policies.solver.trainer.max_staleness=0",
        "policies.solver.trainer.prefetch=1",
        "raas.count=1",
        "hub.session_ttl_s=1",
        "evals={}",
    )
    found = []
    for name in ("whole", "killed"):
        with started("sort.yaml", *sets, runs=tmp_path, cache=cache, name=name) as run:
            if name == "killed":
                run.wait_for_steps(3)
                kill_trainer(run)
            assert run.wait() == 0, run.output
        weights = run.run_dir.checkpoint("solver", 7) / "model.safetensors"
        found.append((final_metrics(run), weights.read_bytes()))
    assert len(read_json_lines(run.run_dir.metrics)) >= 7
    assert found[0] == found[1]
