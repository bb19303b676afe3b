from dataclasses import replace
from datetime import UTC, datetime

import pytest
from rich.console import Console

from astraflow.core.errors import Failure, Reason
from astraflow.core.status import (
    FailureCause,
    FailureReport,
    PolicyStatus,
    RunState,
    RunStatus,
)
from astraflow.launch.status import RunProgress
from astraflow.testing import small_recipe

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LAST = Failure(
    reason=Reason.SCORER_FAILED,
    message="scorer [mine] raised KeyError",
    cause="KeyError at mine.py:3",
    traceback="Traceback (most recent call last):\n  in line 3\nKeyError: 'unit'",
)


def report(*, failed=0, count=128, last=LAST):
    cause = FailureCause(cause=last.cause, count=failed, last=last, first_time=NOW, last_time=NOW)
    return FailureReport(
        finished_count=count,
        failed_count=failed,
        recent_count=count,
        recent_failed_count=failed,
        causes=(cause,) if failed else (),
    )


def status(failures, *, step=0, filtered=0):
    policy = PolicyStatus(
        policy_id="solver",
        version=step,
        step=step,
        open_group_count=0,
        max_open_group_count=1,
        fresh_count=0,
        leased_count=0,
        trained_count=0,
        filtered_group_count=filtered,
    )
    return RunStatus(
        run_id="r",
        state=RunState.RUNNING,
        policies=(policy,),
        members=(),
        failures=failures,
        start_time=NOW,
        server_time=NOW,
    )


@pytest.fixture
def shown(tmp_path):
    """Show what progress prints at these failures, one status after the other."""
    recipe = small_recipe(
        tmp_path, workflow="single_turn", scorer="exact", prompts=[{"prompt": "1"}]
    )

    def show(*reports, filtered=()):
        console = Console(width=200, force_terminal=False, no_color=True)
        with console.capture() as captured:
            progress = RunProgress(console, recipe)
            for step, each in enumerate(reports):
                progress.show(status(each, step=100 * step))
            for count in filtered:
                progress.show(status(report(), filtered=count))
        return captured.get()

    return show


def test_a_cause_is_told_once_with_its_traceback(shown):
    text = shown(report(failed=1), report(failed=2), report(failed=9))
    assert text.count("SCORER_FAILED: scorer [mine] raised KeyError") == 1
    assert text.count("  KeyError: 'unit'") == 1


def test_a_traceback_that_comes_later_is_told_too(shown):
    bare = replace(LAST, traceback="")
    text = shown(report(failed=1, last=bare), report(failed=2), report(failed=3, last=bare))
    assert text.count("  KeyError: 'unit'") == 1
    assert text.count("SCORER_FAILED") == 2


def test_the_line_says_what_share_fails(shown):
    assert "failed 12%" in shown(report(failed=16))
    assert "failed" not in shown(report())


def test_the_user_is_warned_once_and_again_after_better_times(shown):
    bad, better, good = report(failed=40), report(failed=20), report(failed=5)
    text = shown(bad, better, bad, good, bad)
    assert text.count("warning: 31% of the last 128 training rollouts failed") == 2
    assert "above 50% the run ends (rollouts.max_failed_share)" in text


def test_the_user_is_warned_once_of_filters_that_leave_nothing(shown):
    text = shown(filtered=(256, 300, 600, 0, 700))
    assert "filters left too little of the last 300 groups" in text
    assert text.count("at 1024 the run ends (rollouts.max_filtered_groups)") == 2


def test_nobody_is_warned_before_enough_have_finished(shown):
    assert "warning" not in shown(report(failed=31, count=31))


def test_what_the_policy_broke_is_one_line(shown):
    fault = Failure(reason=Reason.POLICY_FAULT, message="it hangs", cause="c", traceback="long")
    text = shown(replace(report(failed=1, last=fault), recent_failed_count=0))
    assert "the policy broke a rollout, which counts: it hangs" in text
    assert "long" not in text


def test_the_first_steps_of_a_long_run_are_told_soon(tmp_path):
    changes = {"policies.solver.trainer.step_count": 5000}
    recipe = small_recipe(tmp_path, scorer="exact", prompts=[{"prompt": "1"}], changes=changes)
    console = Console(width=200, force_terminal=False, no_color=True)
    with console.capture() as captured:
        progress = RunProgress(console, recipe)
        for step in range(1000):
            progress.show(status(report(), step=step))
    told = [int(line.split()[2]) for line in captured.get().splitlines()]
    assert told == [0, 2, 6, 14, 30, 62, 126, 254, 510, 926]


def test_a_command_to_be_pasted_is_on_one_line(tmp_path):
    recipe = small_recipe(tmp_path, scorer="exact")
    console, line = Console(width=40, record=True), "on machine 1: " + "astraflow raas join " * 9
    with RunProgress(console, recipe) as progress:
        progress.note(line)
    assert console.export_text() == line + "\n"
