"""Bugs of users: each is told on the console, with the line of the user's own code."""

import queue
import threading
from pathlib import Path

import pytest

from .conftest import started
from .user_bugs import BUGS

pytestmark = pytest.mark.e2e
NO_EVALS = ("evals.held_out.at_start=false", "evals.held_out.at_end=false")
SAID = {
    "raising": "raised KeyError on prompt",
    "wrong type": "returned str 'right', not a number or a Score",
    "not a number": "gave a reward of float nan",
    "missing file": "FileNotFoundError",
    "exit": "SystemExit",
    "no numbers": "not a name and a number",
    "endless": "took longer than 30 s (timeout_s)",
    "bad template": "KeyError: 'question'",
    "dead server": "ConnectionRefusedError",
    "nothing sampled": "ended without sampling a token",
    "huge": "the rollout is larger than the run reads",
    "stray task": "a task that nobody awaits raised LookupError",
}


@pytest.fixture(autouse=True)
def beside_the_user(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")


@pytest.fixture(scope="module")
def buggy(tmp_path_factory, cache):
    """One run with all bugs that leave the others of a group well.

    An engine that begins on a busy machine may need seconds for its first tokens: what is endless
    has to wait longer than that.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
        with started(
            "sort.yaml",
            "workflows.sort={name: user_bugs:Buggy, scorer: user_bugs:score}",
            "rollouts.group_size=16",
            "rollouts.timeout_s=30",
            "rollouts.max_attempts=1",
            "rollouts.max_failed_share=1.0",
            "rollouts.max_failed_groups=1000",
            "policies.solver.trainer.step_count=2",
            "policies.solver.trainer.groups_per_batch=2",
            "raas.count=1",
            *NO_EVALS,
            runs=tmp_path_factory.mktemp("runs"),
            cache=cache,
            is_checked=False,
        ) as run:
            code = run.wait()
    assert code == 0, run.output
    return run


def marked(output):
    """Return the bugs whose marked line is on the console."""
    marks = [line.partition("# bug: ")[2] for line in output.splitlines()]
    return {bug.strip() for mark in marks for bug in mark.split(",") if bug}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_told_with_the_line_of_the_users_code(buggy, bug):
    assert SAID[bug] in buggy.output
    assert bug in marked(buggy.output)


def test_what_fails_is_in_the_line_in_the_log_and_in_the_summary(buggy):
    assert "failed " in buggy.output
    assert "warning: " in buggy.output
    failures = buggy.summary["failures"]
    # A stray task is no rollout that failed.
    assert len(failures["causes"]) >= len(BUGS)
    # Of 16 samples 11 fail; others may time out, or not be finished when the run is over.
    failed, finished = failures["failed_count"], failures["finished_count"]
    assert finished / 2 < failed < finished
    assert failures["failed_share"] == round(failed / finished, 4)
    assert all(cause["traceback"] for cause in failures["causes"])
    assert all(each["balanced"] for each in buggy.books)
    assert marked(buggy.run_dir.log("raas-0").read_text()) == set(BUGS)


@pytest.mark.long
def test_a_scorer_that_raises_on_wrong_answers_ends_the_run(tmp_path, cache):
    with started(
        "sort.yaml",
        "workflows.sort.scorer=user_bugs:score",
        "workflows.sort.name=user_bugs:Buggy",
        "rollouts.group_size=8",
        "rollouts.timeout_s=5",
        *NO_EVALS,
        runs=tmp_path,
        cache=cache,
        is_checked=False,
    ) as run:
        assert run.wait() == 1
    assert "more than rollouts.max_failed_share (0.5) allows" in run.output
    error = run.output.partition("error: the run failed: ")[2]
    assert "# bug: " in error
    assert run.summary["state"] == "failed"


@pytest.mark.long
def test_a_typo_in_an_option_ends_the_run_at_once(tmp_path, cache):
    with started(
        "sort.yaml",
        "workflows.sort.name=user_bugs:Blocking",
        "workflows.sort.options={hnit: x}",
        *NO_EVALS,
        runs=tmp_path,
        cache=cache,
        is_checked=False,
    ) as run:
        assert run.wait() == 1
    assert "cannot work as it is set up" in run.output
    assert "hnit" in run.output
    assert "did you mean 'hint'" in run.output
    # Nobody was started again.
    assert not run.run_dir.log("raas-2").exists()


@pytest.mark.long
def test_a_loop_that_blocks_its_node_is_told_while_it_blocks(tmp_path, cache):
    with started(
        "sort.yaml",
        "workflows.sort={name: user_bugs:Blocking, scorer: letter_sort:LetterSort}",
        "raas.count=1",
        *NO_EVALS,
        runs=tmp_path,
        cache=cache,
        is_checked=False,
    ) as run:
        lines = queue.Queue()
        reader = threading.Thread(target=read_into, args=(run.process.stdout, lines))
        reader.start()
        said = told = ""
        while "# bug: blocking" not in told and "\n  pass" not in told:
            said += lines.get(timeout=200)
            # What was said before it are the warnings of the check.
            told = said.partition("code of a workflow or scorer has blocked the node")[2]
        run.process.kill()
        reader.join()


def read_into(stream, lines):
    for line in stream:
        lines.put(line)
