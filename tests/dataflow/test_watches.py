import asyncio
from datetime import UTC, datetime, timedelta

from astraflow.core.evals import EvalRun, EvalState
from astraflow.core.status import RunState, RunStatus
from astraflow.dataflow.watches import Watches
from made_up import made_up_version

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def info(version, step=0):
    return made_up_version("solver", version, step=step)


async def test_known_versions_come_first_and_then_the_announced():
    watches = Watches()
    watch = watches.versions("solver", (info(0), info(1), info(2)), after=0)
    assert [(await anext(watch)).version for _ in range(2)] == [1, 2]
    async with asyncio.TaskGroup() as group:
        third = group.create_task(anext(watch))
        await asyncio.sleep(0)
        watches.announce(info(3))
    assert third.result().version == 3


async def test_a_slow_watcher_sees_the_newest_of_each_version_once():
    watches = Watches()
    watch = watches.versions("solver", (info(0),), after=None)
    await anext(watch)
    for step in range(3):
        watches.announce(info(2, step))
        watches.announce(info(1, step))
    seen = [await anext(watch) for _ in range(2)]
    assert [(i.version, i.step) for i in seen] == [(1, 2), (2, 2)]


async def test_a_version_announced_while_the_known_are_read_is_not_missed():
    watches = Watches()
    watch = watches.versions("solver", (info(0), info(1)), after=None)
    await anext(watch)
    watches.announce(info(2))
    assert [(await anext(watch)).version for _ in range(2)] == [1, 2]


async def test_an_eval_is_shown_at_each_change_until_it_is_final():
    watches = Watches()
    states = [EvalState.PENDING]

    def look(eval_run_id):
        return EvalRun(
            eval_run_id=eval_run_id,
            suite="s",
            versions={},
            state=states[0],
            rollout_count=1,
            create_time=NOW,
        )

    seen = []
    async for run in watches.eval_run("e-1", look):
        seen.append(run.state)
        watches.evals.touch()
        states[0] = EvalState.RUNNING if len(seen) == 1 else EvalState.SUCCEEDED
    assert seen == [EvalState.PENDING, EvalState.RUNNING, EvalState.SUCCEEDED]


async def test_a_final_run_ends_its_watch_without_waiting():
    watches = Watches()
    states = [RunState.RUNNING]

    def look():
        return RunStatus(
            run_id="r", state=states[0], policies=(), members=(), start_time=NOW, server_time=NOW
        )

    seen = []
    async for status in watches.status(look, interval=timedelta(hours=1)):
        seen.append(status.state)
        states[0] = RunState.DONE
        watches.state.touch()
    assert seen == [RunState.RUNNING, RunState.DONE]


async def test_other_changes_are_shown_after_the_interval():
    watches = Watches()

    def look():
        return RunStatus(
            run_id="r",
            state=RunState.RUNNING,
            policies=(),
            members=(),
            start_time=NOW,
            server_time=NOW,
        )

    watch = watches.status(look, interval=timedelta())
    await anext(watch)
    watches.change.touch()
    await anext(watch)
