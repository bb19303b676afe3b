"""Whose folder it is, and whether its run can go on."""

import json
import os

import pytest

from astraflow.config.run_dir import HubEndpoint, RunDir
from astraflow.core.errors import AstraflowError, Reason
from astraflow.launch.run_folder import claim_run_dir, next_node_index, reopen_run

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


def hub_of(pid):
    return HubEndpoint(address="h:1", pid=pid, operator_token="o", join_token="j")


def test_a_run_that_died_goes_on_with_its_own_recipe(died):
    died.status.write_text(json.dumps({"state": "running"}))
    assert reopen_run(died).name == "test"


def test_a_run_without_a_journal_is_refused(died):
    died.journal.unlink()
    with pytest.raises(AstraflowError, match="has no journal to go on with") as caught:
        reopen_run(died)
    assert caught.value.reason is Reason.NOT_READY


def test_a_run_that_is_over_is_refused(died):
    died.status.write_text(json.dumps({"state": "done"}))
    with pytest.raises(AstraflowError, match=r"is over \(done\)") as caught:
        reopen_run(died)
    assert caught.value.reason is Reason.RUN_ENDED


def test_a_live_run_is_neither_resumed_nor_moved(died):
    died.write_endpoint(hub_of(os.getpid()))
    for attempt in (lambda: reopen_run(died), lambda: claim_run_dir(died.root.parent, "run")):
        with pytest.raises(AstraflowError, match="is a live run") as caught:
            attempt()
        assert caught.value.reason is Reason.NAME_TAKEN


def test_an_older_run_is_moved_aside(died):
    fresh = claim_run_dir(died.root.parent, "run")
    assert not list(fresh.root.iterdir())
    (older,) = [path for path in fresh.root.parent.iterdir() if path != fresh.root]
    assert older.name.startswith("run.")
    assert RunDir(older).recipe.read_text() == RECIPE


def test_nodes_take_names_that_no_node_had(died):
    assert next_node_index(died) == 0
    died.log("hub").parent.mkdir()
    for name in ("raas-0", "raas-11", "raas-far", "hub"):
        died.log(name).touch()
    assert next_node_index(died) == 12
