"""Environments in processes of their own: real ones, which die, hang and say nonsense."""

import asyncio
import os
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.workflows.environments.pool import EnvironmentPool, PoolOptions


@asynccontextmanager
async def pool_of(world, **options):
    name = world if ":" in world or world == "gymnasium" else f"worlds:{world}"
    pool = EnvironmentPool(PoolOptions(environment=name, **{"workers": 1, **options}))
    try:
        yield pool
    finally:
        await pool.close()


def processes_with(mark):
    """Return what runs with a word on its command line, keepers included."""
    running = psutil.process_iter(["cmdline"])
    return [each for each in running if any(mark in word for word in each.info["cmdline"] or ())]


async def failure(call):
    with pytest.raises(AstraflowError) as caught:
        await call
    return caught.value


async def test_an_episode_is_played_to_its_end():
    async with pool_of("Countdown", environment_options={"start": 2}) as pool:
        async with pool.open() as world:
            assert await world.reset({"seed": 1}, 1) == "from 2"
            assert (await world.step("5")).observation == "not 5"
            first, last = await world.step("2"), await world.step("1")
        assert (first.reward, first.is_done, dict(first.metrics)) == (0.5, False, {"left": 1.0})
        assert (last.reward, last.is_done) == (0.5, True)
        # The row reaches the environment, which is used again.
        async with pool.open() as world:
            assert await world.reset({"start": 7}, 1) == "from 7"


async def test_environments_of_one_process_have_random_numbers_of_their_own():
    async with pool_of("Dice", per_worker=2) as pool:

        async def play(world, count):
            said = [await world.reset({}, 5)]
            return said + [(await world.step("roll")).observation for _ in range(count)]

        async with pool.open() as world:
            alone = await play(world, 3)
        async with pool.open() as one, pool.open() as other:
            together = await asyncio.gather(play(one, 3), play(other, 3))
        assert together == [alone, alone]


async def test_what_an_environment_raises_is_its_failure_and_it_is_made_anew():
    async with pool_of("Moody") as pool, pool.open() as world, pool.open() as neighbour:
        await world.reset({}, 1)
        await neighbour.reset({}, 1)
        error = await failure(world.step("raise"))
        assert error.reason is Reason.ENVIRONMENT_FAILED
        assert error.retryable
        for part in ("worlds:Moody", "RuntimeError: the dragon is tired", "worlds.py", "step"):
            assert part in error.message
        assert error.cause.startswith("RuntimeError at worlds.py:")
        # Down to the line of whoever wrote it.
        assert error.traceback.endswith(
            'raise RuntimeError("the dragon is tired")\nRuntimeError: the dragon is tired'
        )
        assert "SystemExit" in (await failure(neighbour.step("exit"))).message
        assert await world.reset({}, 2) == "from 3"


async def test_an_answer_that_is_too_long_is_nobody_elses():
    async with pool_of("Moody") as pool, pool.open() as world, pool.open() as neighbour:
        await world.reset({}, 1)
        await neighbour.reset({}, 1)
        error = await failure(world.step("shout"))
        assert error.reason is Reason.ENVIRONMENT_FAILED
        assert "at most 16 MiB" in error.message
        assert "gone" in (await failure(neighbour.step("3"))).message
        assert await world.reset({"start": 5}, 1) == "from 5"
        assert await neighbour.reset({"start": 7}, 1) == "from 7"


async def test_an_environment_may_complain_for_ever():
    async with pool_of("Moody") as pool, pool.open() as world:
        await world.reset({}, 1)
        # A file of theirs has at most 64 MiB.
        for _ in range(3):
            assert (await world.step("complain")).observation == "not complain"


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("nan", "the reward is nan"),
        ("inf", "gold is inf"),
        ("none", "step returned NoneType, not a Step"),
        ("object", "not JSON"),
        ("number", "neither text nor messages"),
    ],
)
async def test_nonsense_is_told_and_never_a_reward(action, said):
    async with pool_of("Moody") as pool, pool.open() as world:
        await world.reset({}, 1)
        error = await failure(world.step(action))
    assert error.reason is Reason.ENVIRONMENT_FAILED
    assert said in error.message


async def test_a_process_that_dies_is_replaced_and_fails_who_was_in_it():
    async with pool_of("Moody") as pool:
        async with pool.open() as world, pool.open() as neighbour:
            await world.reset({}, 1)
            await neighbour.reset({}, 1)
            assert "out of dragons" in (await failure(world.step("die"))).message
            assert "is gone" in (await failure(neighbour.step("3"))).message
        async with pool.open() as world:
            assert await world.reset({}, 1) == "from 3"


async def test_a_process_that_hangs_is_killed_and_nothing_of_it_stays():
    mark = {"start": 31_175_117}
    async with pool_of("Moody", step_time_s=0.5, environment_options=mark) as pool:
        async with pool.open() as world:
            await world.reset({}, 1)
            assert processes_with("31175117")
            error = await failure(world.step("hang"))
            assert "step on 'hang' took longer than 0.5 s (step_time_s)" in error.message
        assert not processes_with("31175117")
        async with pool.open() as world:
            assert await world.reset({}, 1) == "from 31175117"
    assert not processes_with("31175117")


_OWNER = """
import asyncio, sys
from astraflow.workflows.environments.pool import EnvironmentPool, PoolOptions

async def main():
    options = {"start": 31_175_118}
    pool = EnvironmentPool(PoolOptions(environment="worlds:Moody", environment_options=options))
    async with pool.open() as world:
        await world.reset({}, 1)
        print("playing", flush=True)
        await world.step("hang")

asyncio.run(main())
"""


def test_nothing_stays_of_an_owner_that_is_killed():
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    command = [sys.executable, "-c", _OWNER]
    env = os.environ | {"PYTHONPATH": path}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as owner:
        assert owner.stdout.readline() == b"playing\n"
        left = processes_with("31175118")
        assert left
        owner.kill()
    _, alive = psutil.wait_procs(left, timeout=60)
    assert not alive


async def test_who_is_cancelled_leaves_the_line_in_order():
    async with pool_of("Moody", per_worker=1) as pool:
        async with pool.open() as world:
            await world.reset({}, 1)
            steps = asyncio.ensure_future(world.step("3"))
            await asyncio.sleep(0)
            steps.cancel()
        async with pool.open() as world:
            assert await world.reset({}, 1) == "from 3"
            assert (await world.step("3")).observation == "go on"


async def test_more_episodes_than_places_take_turns():
    async with pool_of("Countdown", workers=2, per_worker=1) as pool:
        running = most = 0

        async def play():
            nonlocal running, most
            async with pool.open() as world:
                running += 1
                most = max(most, running)
                await world.reset({}, 1)
                running -= 1

        await asyncio.gather(*(play() for _ in range(6)))
    assert most == 2


@pytest.mark.parametrize(
    ("world", "options", "reason", "said"),
    [
        ("nowhere:Atall", {}, Reason.CODE_UNKNOWN, "No module named 'nowhere'"),
        ("worlds:Atall", {}, Reason.CODE_UNKNOWN, "Atall"),
        ("Countdown", {"strat": 3}, Reason.INVALID_FIELD, "strat"),
        ("NeverMade", {}, Reason.ENVIRONMENT_FAILED, "the dragon's lair is locked"),
    ],
)
async def test_what_cannot_be_made_says_why(world, options, reason, said):
    async with pool_of(world, environment_options=options) as pool, pool.open() as place:
        error = await failure(place.reset({}, 1))
    assert error.reason is reason
    assert said in error.message


async def test_a_package_that_is_missing_is_told_with_the_cure():
    pool = EnvironmentPool(PoolOptions(environment="gem", environment_options={"id": "x"}))
    async with pool.open() as world:
        error = await failure(world.reset({}, 1))
    await pool.close()
    assert error.reason is Reason.CODE_UNKNOWN
    assert "No module named 'gem'" in error.message
    assert "options.python" in error.message


@pytest.mark.parametrize(
    ("options", "reason", "said"),
    [
        ({"environment": "textarina"}, Reason.CODE_UNKNOWN, "did you mean textarena"),
        ({"python": "/no/such/python"}, Reason.INVALID_FIELD, "/no/such/python is no program"),
        (
            {"environment_options": {"gmae": "x"}},
            Reason.INVALID_FIELD,
            "missing a required argument: 'game'; known are game, settings",
        ),
        (
            {"environment": "alfworld", "environment_options": {"fodler": "x"}},
            Reason.INVALID_FIELD,
            "unexpected keyword argument 'fodler'; known are folder, commands",
        ),
    ],
)
def test_what_can_be_told_before_a_process_starts_is_told(options, reason, said):
    with pytest.raises(AstraflowError, match=said) as caught:
        EnvironmentPool(PoolOptions(**{"environment": "textarena", **options}))
    assert caught.value.reason is reason


async def test_what_has_gymnasiums_methods_is_adapted():
    options = {"make": "worlds:GymGuess"}
    async with pool_of("gymnasium", environment_options=options) as pool, pool.open() as world:
        assert await world.reset({}, 17) == "guess\nYour guess?"
        step = await world.step("5")
        assert (step.observation, step.reward, step.is_done) == ("wrong", 0.0, False)
        step = await world.step("7")
        assert (step.reward, step.is_done, step.metrics) == (1.0, True, {"hot": 1.0})
        await world.reset({"options": {"secret": 5}}, 17)
        assert (await world.step("5")).is_done
    options["numbers"] = True
    async with pool_of("gymnasium", environment_options=options) as pool, pool.open() as world:
        assert "the observation is int, not text" in (await failure(world.reset({}, 1))).message
