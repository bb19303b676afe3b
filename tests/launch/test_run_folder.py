"""Whose folder it is, and whether its run can go on."""

import errno
import json
import os
import subprocess
import sys

import psutil
import pytest

from astraflow.config.run_dir import HubEndpoint, RunDir
from astraflow.core.errors import AstraflowError, Reason
from astraflow.launch.run_folder import (
    claimed_run_dir,
    held_run_dir,
    next_node_index,
    reopened_recipe,
)
from astraflow.storage.lock import FileLock, lock_beside

RECIPE = """
name: test
policies: {solver: {model: {path: /model}}}
data: {train: {path: /train.jsonl}}
workflows: {main: {name: single_turn}}
rollouts: {data_set: train, workflow: main}
"""


@pytest.fixture
def died(tmp_path):
    run_dir = RunDir(tmp_path / "run")
    run_dir.journal.parent.mkdir(parents=True)
    run_dir.journal.touch()
    run_dir.recipe.write_text(RECIPE)
    return run_dir


def hub_of(pid, **others):
    return HubEndpoint(address="h:1", pid=pid, operator_token="o", join_token="j", **others)


def test_a_run_that_died_goes_on_with_its_own_recipe(died):
    died.status.write_text(status_of("running", 3))
    assert reopened_recipe(died).name == "test"


def test_a_run_without_a_journal_is_refused(died):
    died.journal.unlink()
    with pytest.raises(AstraflowError, match="has no journal to go on with") as caught:
        reopened_recipe(died)
    assert caught.value.reason is Reason.NOT_READY


def status_of(state, step):
    return json.dumps({"state": state, "policies": [{"policy_id": "solver", "step": step}]})


MORE = "policies.solver.trainer.step_count"


def test_a_run_that_has_done_its_steps_goes_on_with_more(died):
    died.recipe.write_text(RECIPE.replace("}}}\ndata", "}, trainer: {step_count: 5}}}\ndata"))
    died.status.write_text(status_of("done", 5))
    with pytest.raises(AstraflowError, match=f"{MORE}=10") as caught:
        reopened_recipe(died)
    assert caught.value.reason is Reason.RUN_ENDED
    recipe = reopened_recipe(died, [f"{MORE}=6"])
    assert recipe.policies["solver"].trainer.step_count == 6


def test_a_run_that_was_stopped_or_failed_goes_on(died):
    for state in ("done", "failed"):
        died.status.write_text(status_of(state, 5))
        assert reopened_recipe(died).name == "test"


def test_what_the_hub_has_decided_by_stays_and_is_named(died):
    free = ["policies.solver.trainer.optimizer.learning_rate=1e-6", "raas.count=3"]
    recipe = reopened_recipe(died, free)
    assert recipe.policies["solver"].trainer.optimizer.learning_rate == 1e-6
    assert recipe.raas.count == 3
    with pytest.raises(AstraflowError) as caught:
        reopened_recipe(died, [*free, "rollouts.group_size=3", "seed=4"])
    assert caught.value.reason is Reason.INVALID_FIELD
    assert "by: rollouts.group_size=3, seed=4 cannot" in caught.value.message


def test_a_live_run_is_neither_resumed_nor_moved(died):
    began_s = psutil.Process().create_time()
    for hub in (hub_of(os.getpid()), hub_of(os.getpid(), start_time_s=began_s)):
        died.write_endpoint(hub)
        with pytest.raises(AstraflowError, match="is a live run") as caught:
            reopened_recipe(died)
        assert caught.value.reason is Reason.NAME_TAKEN
        with (
            pytest.raises(AstraflowError, match="is a live run"),
            claimed_run_dir(died.root.parent, "run"),
        ):
            pass


def test_a_process_that_got_the_number_of_a_dead_hub_is_not_taken_for_it(died):
    began_s = psutil.Process().create_time()
    died.write_endpoint(hub_of(os.getpid(), start_time_s=began_s - 3600))
    assert reopened_recipe(died).name == "test"


def test_a_hub_whose_clock_was_set_since_is_live_for_it_holds_its_journal(died):
    began_s = psutil.Process().create_time()
    died.write_endpoint(hub_of(os.getpid(), start_time_s=began_s - 3600))
    lock = FileLock.take(lock_beside(died.journal))
    try:
        with pytest.raises(AstraflowError, match="is a live run"):
            reopened_recipe(died)
    finally:
        lock.release()


def test_a_hub_that_ended_and_was_not_waited_for_is_not_live(died):
    with subprocess.Popen(["sleep", "60"]) as hub:
        began_s = psutil.Process(hub.pid).create_time()
        died.write_endpoint(hub_of(hub.pid, start_time_s=began_s))
        with pytest.raises(AstraflowError, match="is a live run"):
            reopened_recipe(died)
        hub.kill()
        os.waitid(os.P_PID, hub.pid, os.WEXITED | os.WNOWAIT)
        assert reopened_recipe(died).name == "test"


def test_an_older_run_is_moved_aside(died):
    with claimed_run_dir(died.root.parent, "run") as fresh:
        assert [path.name for path in fresh.root.iterdir()] == ["lock"]
    (older,) = [path for path in fresh.root.parent.glob("run*") if path != fresh.root]
    assert older.name.startswith("run.")
    assert RunDir(older).recipe.read_text() == RECIPE


CLAIM = """
import sys, time
from pathlib import Path
from astraflow.launch.run_folder import claimed_run_dir
with claimed_run_dir(Path(sys.argv[1]), "run") as run_dir:
    (run_dir.root / sys.argv[2]).touch()
    sys.stdin.read()
"""


def test_of_runs_that_are_started_at_once_one_has_the_folder(tmp_path):
    command = (sys.executable, "-c", CLAIM, tmp_path)
    started = [
        subprocess.Popen([*command, str(n)], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        for n in range(3)
    ]
    losers = set()
    while len(losers) < len(started) - 1:
        losers |= {each for each in started if each.poll() is not None}
    (winner,) = set(started) - losers
    with (
        pytest.raises(AstraflowError, match="is at work in"),
        held_run_dir(RunDir(tmp_path / "run"), "wait"),
    ):
        pass
    winner.communicate()
    assert winner.returncode == 0
    for each in losers:
        assert b"is at work in" in each.communicate()[1]
    marks = {str(started.index(winner)), "lock"}
    assert {path.name for path in (tmp_path / "run").iterdir()} == marks
    with claimed_run_dir(tmp_path, "run"):
        pass


def test_nodes_take_names_that_no_node_had(died):
    assert next_node_index(died) == 0
    died.log("hub").parent.mkdir()
    for name in ("raas-0", "raas-11", "raas-far", "hub"):
        died.log(name).touch()
    assert next_node_index(died) == 12


def test_a_process_that_cannot_be_started_is_not_taken_for_another_run(died):
    # As fork says it at the limit of processes.
    with pytest.raises(BlockingIOError, match="unavailable"), held_run_dir(died, "wait"):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
