"""Runs are listed, compared and stopped by what lies in their folders."""

import json
import os
import subprocess
import sys
import tracemalloc
from dataclasses import replace

import pytest
from rich.console import Console

from astraflow.config.run_dir import HubEndpoint, RunDir
from astraflow.core.errors import AstraflowError, Reason
from astraflow.launch.processes import last_lines
from astraflow.launch.run_folder import held_run_dir
from astraflow.launch.runs import differences, list_runs, log_lines, show_differences, show_runs

RECIPE = """
name: {name}
seed: {seed}
policies: {{solver: {{model: {{path: /model}}}}}}
"""


@pytest.fixture
def run(tmp_path):
    def make(name, *, seed=0, rewards=(), state=None):
        run_dir = RunDir(tmp_path / name)
        run_dir.log("hub").parent.mkdir(parents=True)
        run_dir.recipe.write_text(RECIPE.format(name=name, seed=seed))
        rows = [
            {"policy": "solver", "step": n, "reward/mean": reward}
            for n, reward in enumerate(rewards, 1)
        ]
        run_dir.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
        if state is not None:
            run_dir.summary.write_text(json.dumps({"state": state, "wall_s": 9.0}))
        return run_dir

    return make


def test_runs_are_listed_with_how_they_ended_and_nothing_is_written(run, tmp_path):
    done, died = run("done", rewards=(-2.0, 3.0), state="done"), run("died", rewards=(0.5,))
    live = run("live")
    live.write_endpoint(
        HubEndpoint(address="h:1", pid=os.getpid(), operator_token="o", join_token="j")
    )
    before = done.summary.read_text()
    rows = {row["name"]: row for row in list_runs(tmp_path)}
    assert {name: row["state"] for name, row in rows.items()} == {
        "done": "done",
        "died": "died",
        "live": "live",
    }
    assert (rows["done"]["steps"], rows["done"]["wall_s"]) == (2, 9.0)
    assert (rows["done"]["reward_first"], rows["done"]["reward_last"]) == (-2.0, 3.0)
    assert rows["live"]["reward_first"] is None
    assert done.summary.read_text() == before
    assert not died.summary.exists()


def test_a_run_that_was_resumed_and_killed_died_whatever_its_first_part_came_to(run, tmp_path):
    # A launcher that ends takes the endpoint with it; one that is killed leaves it.
    hub = HubEndpoint(address="h:1", pid=os.getpid(), operator_token="o", join_token="j")
    run("resumed", state="stopped").write_endpoint(replace(hub, start_time_s=1.0))
    (row,) = list_runs(tmp_path)
    assert (row["state"], row["wall_s"]) == ("died", 9.0)


def test_a_run_whose_hub_does_not_serve_yet_is_starting_and_one_that_is_damaged_hides_no_other(
    run, tmp_path
):
    run("torn").recipe.write_text("name: [")
    run("odd", state="done").summary.write_text("[1]")
    with held_run_dir(run("early"), "wait"):
        rows = {row["name"]: row for row in list_runs(tmp_path)}
    assert {name: row["state"] for name, row in rows.items()} == {
        "torn": "unreadable",
        "odd": "unreadable",
        "early": "starting",
    }
    assert rows["torn"].keys() == rows["early"].keys()
    assert "expected" in rows["torn"]["failure"]
    assert {row["state"] for row in list_runs(tmp_path)} == {"unreadable", "died"}


def test_recipes_are_compared_key_by_key(run):
    assert differences([run("a"), run("b", seed=3)]) == {"seed": [0, 3]}


def test_what_recipes_say_is_shown_as_it_is(run):
    runs = [run("[a]"), run("b")]
    runs[0].recipe.write_text("stop: ['[/INST]']\npattern: '[a-z]+'")
    console = Console(record=True, width=120)
    show_runs(console, list_runs(runs[0].root.parent))
    show_differences(console, runs, differences(runs))
    shown = console.export_text()
    assert [text in shown for text in ("['[/INST]']", "[a-z]+")] == [True, True]
    assert shown.count("[a]") == 2


def test_logs_are_those_of_the_roles_and_a_line_is_whole(run):
    run_dir = run("a")
    run_dir.log("hub").write_text("one\ntwo\nthr")
    run_dir.log("raas-0").write_text("three\n")
    assert [*log_lines(run_dir, None, count=1, is_followed=False)] == ["hub: two", "raas-0: three"]
    assert not [*log_lines(run_dir, None, count=0, is_followed=False)]
    # A run that is over is not waited for.
    assert [*log_lines(run_dir, "hub", count=9, is_followed=True)] == ["one", "two"]
    with pytest.raises(AstraflowError, match="no log of trainer; known: hub, raas-0") as caught:
        next(log_lines(run_dir, "trainer", count=1, is_followed=False))
    assert caught.value.reason is Reason.NOT_READY


def test_of_a_log_of_days_the_end_alone_is_in_memory(run):
    run_dir = run("a")
    with run_dir.log("hub").open("wb") as file:
        for _ in range(1000):
            file.write(b"x" * 99_999 + b"\n")
        file.write(b"the end\n")
    tracemalloc.start()
    assert [*log_lines(run_dir, "hub", count=1, is_followed=False)] == ["the end"]
    assert last_lines(run_dir.log("hub")).endswith("\nthe end")
    peak_nbytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_nbytes < run_dir.log("hub").stat().st_size / 2


def test_what_is_logged_is_not_among_what_a_program_reads(tmp_path):
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "recipe.yaml").write_text(": [")
    command = [sys.executable, "-m", "astraflow", "ls", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [row["state"] for row in json.loads(done.stdout)] == ["unreadable"]
    assert "a run cannot be read" in done.stderr
