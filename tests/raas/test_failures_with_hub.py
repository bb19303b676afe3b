"""Failures from the line where they arise to the run's status, over real sockets."""

import asyncio

import pytest

from astraflow.core.errors import Failure, Reason
from astraflow.core.rollouts import Outcome
from astraflow.core.status import RunState
from astraflow.testing import small_recipe, start_run
from astraflow.workflows.protocol import PolicyFault
from astraflow.workflows.registry import scorer


@scorer("failing_on_wrong")
def failing_on_wrong(prompt, text):
    if text != "right":
        raise KeyError("unit")  # on wrong answers
    return 1.0


@scorer("failing_hangs")
def hangs(prompt, text):
    if text != "right":
        raise PolicyFault("its program hangs", parts={"timeout": 1.0})
    return 1.0


class Turns:
    """Says something right now and then."""

    def __init__(self, *, right_every):
        self._right_every = right_every
        self._count = 0

    def __call__(self, text):
        self._count += 1
        return "right" if self._count % self._right_every == 0 else "wrong"


def recipe_of(folder, scorer, **rollouts):
    changes = {f"rollouts.{key}": value for key, value in rollouts.items()}
    steps = {"policies.solver.trainer.step_count": 16, "rollouts.min_group_size": 1}
    return small_recipe(folder, scorer=scorer, changes={**steps, **changes})


async def test_a_scorer_that_raises_on_wrong_answers_ends_the_run_and_is_told(tmp_path):
    recipe = recipe_of(tmp_path, "failing_on_wrong", max_attempts=1)
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        await run.add_node(answer=Turns(right_every=4))
        run.add_trainer()
        status = await run.finish()
    assert status.state is RunState.FAILED
    assert status.failure.reason is Reason.SCORER_FAILED
    assert "# on wrong answers" in status.failure.traceback
    (cause,) = status.failures.causes
    assert cause.cause.startswith("KeyError at test_failures_with_hub.py:")
    assert "raised KeyError on prompt" in cause.last.message
    assert cause.count == status.failures.failed_count


async def test_a_recipe_may_let_it_go_on(tmp_path):
    recipe = recipe_of(tmp_path, "failing_on_wrong", max_failed_share=1.0, max_failed_groups=10**6)
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        await run.add_node(answer=Turns(right_every=2))
        run.add_trainer()
        status = await run.finish()
    assert status.state is RunState.DONE
    assert status.failures.failed_count


async def test_what_the_policy_broke_is_rewarded_as_the_recipe_says(tmp_path):
    recipe = recipe_of(tmp_path, "failing_hangs", policy_fault_reward=-0.25)
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        await run.add_node(answer=Turns(right_every=3))
        run.add_trainer()
        status = await run.finish()
    assert status.state is RunState.DONE
    broken = [r for r in run.rollouts() if r.rollout.outcome is Outcome.POLICY_FAULT]
    assert broken
    assert {record.rollout.reward for record in broken} == {-0.25}
    assert {record.rollout.failure.message for record in broken} == {"its program hangs"}
    assert status.failures.failed_count == 0
    assert status.failures.causes[0].last.reason is Reason.POLICY_FAULT
    # Each was sampled once, and trained on.
    assert run.accounts()[0].reissued_count == 0
    assert not [d for d in run.accounts()[0].drops if d.reason is Reason.POLICY_FAULT]


@pytest.mark.parametrize("is_blocked", [False, True])
async def test_a_node_tells_of_what_belongs_to_no_rollout(tmp_path, is_blocked):
    failure = Failure(reason=Reason.ENVIRONMENT_FAILED, message="odd", cause="c", traceback="t")
    async with start_run(
        small_recipe(tmp_path, scorer="failing_hangs"), run_dir=tmp_path / "run"
    ) as run:
        live = await run.add_node(answer=lambda text: "right")
        control = await run.control()
        live.engine.open.clear()
        run.add_trainer()
        # It works: it has joined.
        await live.engine.until(lambda: live.engine.running)
        if is_blocked:
            await asyncio.to_thread(live.node.report_from_thread, failure)
        else:
            live.node.report(failure)
        async for status in control.watch_run(min_interval_s=0.01):
            if causes := status.failures.causes:
                break
        assert [(each.cause, each.last) for each in causes] == [("c", failure)]
