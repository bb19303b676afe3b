"""What every adapter has to do, with the real packages, in interpreters of their own."""

import os
import subprocess
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import Outcome
from astraflow.testing import small_recipe, start_run
from astraflow.workflows.environments.pool import EnvironmentPool, PoolOptions

pytestmark = [pytest.mark.slow, pytest.mark.environments]

# An adapter joins with a line: the venv, options, an action that is no good, what is seen first,
# and options that are refused.
CASES = {
    "reasoning_gym": (
        "games",
        {"dataset": "chain_sum"},
        "?",
        "arithmetic problem",
        {"dataset": "chain_sums"},
    ),
    "textarena": (
        "games",
        {"game": "GuessTheNumber-v0"},
        "[99]",
        "between 1 and 20",
        {"game": "Chess-v99"},
    ),
    "textcraft": ("games", {"max_depth": 2}, "make a wish", "Goal: craft", {"min_depth": 9}),
    "gem": (
        "gem",
        {"id": "game:GuessTheNumber-v0-easy"},
        "what?",
        "between 1 and 10",
        {"id": "game:Chess"},
    ),
    "textworld": (
        "textworld",
        {"challenge": "tw-coin_collector", "settings": {"level": 1}},
        "dance",
        "coin",
        {"challenge": "tw-chess"},
    ),
    "textworld_express": (
        "textworld-express",
        {"game": "coin", "params": "numLocations=1,includeDoors=0,numDistractorItems=0"},
        "dance",
        "coin",
        {"game": "chess"},
    ),
}


def interpreter(name):
    """Return an interpreter that `scripts/install_environments.py` made."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    found = Path(base, "astraflow", "environments", name, "bin", "python")
    if not found.exists():
        pytest.skip(f"{name} is not installed; run scripts/install_environments.py {name}")
    return str(found)


@pytest.fixture
def games(tmp_path_factory):
    """Return a folder in which games that were made stay for all tests."""
    return tmp_path_factory.getbasetemp() / "games"


@asynccontextmanager
async def pool_of(name, options, venv):
    given = {"environment": name, "environment_options": options, "python": interpreter(venv)}
    pool = EnvironmentPool(PoolOptions(workers=1, **given))
    try:
        yield pool
    finally:
        await pool.close()


@asynccontextmanager
async def world_of(name, games, **changes):
    venv, options, *_ = CASES[name]
    if name == "textworld":
        options = {**options, "folder": str(games)}
    async with pool_of(name, {**options, **changes}, venv) as pool, pool.open() as world:
        yield world


@pytest.mark.parametrize("name", CASES)
async def test_an_adapter_keeps_the_protocol(name, games):
    _, _, bad, seen, _ = CASES[name]
    async with world_of(name, games) as world:
        first = await world.reset({"seed": 1}, 1)
        assert seen in first
        step = await world.step(bad)
        assert isinstance(step.observation, str)
        assert step.reward <= 0
        # It is used again, and nothing of an episode stays.
        assert await world.reset({"seed": 1}, 1) == first


@pytest.mark.parametrize("name", CASES)
async def test_options_that_it_does_not_know_are_told(name, games):
    wrong = CASES[name][-1]
    async with world_of(name, games, **wrong) as world:
        with pytest.raises(AstraflowError, match=str(*wrong.values())) as caught:
            await world.reset({}, 1)
    assert caught.value.reason in (Reason.INVALID_FIELD, Reason.ENVIRONMENT_FAILED)


@pytest.mark.parametrize(
    ("name", "answer", "rewards"),
    [
        ("reasoning_gym", "7", {0.0, 1.0}),
        ("textarena", "[7]", None),
        ("gem", "\\boxed{7}", None),
        ("textcraft", "inventory", {0.0}),
        ("textworld", "take coin", {1.0}),
        ("textworld_express", "take coin", {1.0}),
    ],
)
async def test_a_recipe_alone_trains_on_it(tmp_path, games, name, answer, rewards):
    venv, options, *_ = CASES[name]
    if name == "textworld":
        options = {**options, "folder": str(games)}
    recipe = small_recipe(
        tmp_path,
        workflow="environment",
        changes={
            "data.train": {"seeds": [0, 2]},
            "workflows.main.options": {
                "environment": name,
                "environment_options": options,
                "python": interpreter(venv),
                "max_turns": 2,
                "workers": 1,
            },
            "policies.solver.sampling.max_new_tokens": 16,
        },
    )
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        await run.add_node(answer=lambda text: answer)
        run.add_trainer()
        await run.finish()
    rollouts = [each.rollout for each in run.rollouts()]
    assert len(rollouts) >= 12
    assert {each.outcome for each in rollouts} == {Outcome.SCORED}
    assert all(0 < each.trajectories[0].sampled_mask.sum() <= 2 * len(answer) for each in rollouts)
    if rewards is not None:
        assert {each.reward for each in rollouts} <= rewards


async def test_reasoning_gym_scores_and_forgives_its_scorers(games):
    async with world_of("reasoning_gym", games, dataset="prime_factorization") as world:
        assert "prime factorization" in (await world.reset({}, 4)).lower()
        # Its scorer raises on this.
        step = await world.step("xx")
        assert (step.reward, step.is_done) == (0.0, True)
    async with world_of(
        "reasoning_gym", games, dataset="chain_sum", min_terms=2, max_terms=2
    ) as it:
        question = await it.reset({}, 4)
        sum_of = question.rsplit(":", 1)[1].removesuffix("=").strip()
        step = await it.step(str(eval(sum_of)))
        assert (step.reward, step.is_done, step.metrics["score"]) == (1.0, True, 1.0)
    async with world_of("reasoning_gym", games, dataset="power_function", exact=True) as world:
        await world.reset({}, 4)
        assert (await world.step("0")).reward == 0.0


async def test_textarena_plays_a_game_to_its_end(games):
    async with world_of("textarena", games) as world:
        await world.reset({}, 3)
        low, high = 1, 20
        for _ in range(5):
            guess = (low + high) // 2
            # A game puts the brackets around a bare number itself.
            step = await world.step(f"I say [{guess}]" if guess % 2 else str(guess))
            if step.is_done:
                break
            # Only what is new: the chat has the rest.
            assert "Guess The Number" not in step.observation
            assert step.observation.startswith("[GAME] The target number is")
            low, high = (guess + 1, high) if "higher" in step.observation else (low, guess - 1)
        assert (step.is_done, step.reward) == (True, 1.0)
        assert step.metrics["invalid"] == 0.0


async def test_gem_plays_a_game_to_its_end(games):
    async with world_of("gem", games) as world:
        await world.reset({}, 3)
        low, high = 1, 10
        for _ in range(4):
            guess = (low + high) // 2
            step = await world.step(f"\\boxed{{{guess}}}")
            if step.is_done:
                break
            low, high = (guess + 1, high) if "higher" in step.observation else (low, guess - 1)
        assert (step.is_done, step.reward) == (True, 1.0)


async def test_textcraft_crafts_a_goal(games):
    async with world_of("textcraft", games) as world:
        said = await world.reset({"goal": "minecraft:stick"}, 1)
        assert said.endswith("Goal: craft stick.")
        # Another order of sets in another process would say other lines.
        assert said == await world.reset({"goal": "minecraft:stick"}, 1)
        assert "Could not" in (await world.step("craft 4 stick using 2 bamboo")).observation
        step = await world.step("get 2 bamboo")
        assert step.observation == "Got 2 bamboo"
        step = await world.step("craft 1 stick using 2 bamboo")
        assert (step.reward, step.is_done) == (1.0, True)
        with pytest.raises(AstraflowError, match="nothing can be crafted to be 'stick'"):
            await world.reset({"goal": "stick"}, 1)


async def test_textworld_makes_a_game_once_and_plays_it(games):
    async with world_of("textworld", games) as world:
        first = await world.reset({}, 1)
        assert "You can:" in first
        step = await world.step("take coin")
        assert (step.reward, step.is_done, step.metrics["won"]) == (1.0, True, 1.0)
    (game,) = games.glob("*-1.z8")
    made = game.stat().st_mtime_ns
    async with world_of("textworld", games, challenge="", settings={}) as world:
        assert await world.reset({"game": str(game)}, 1) == first
        with pytest.raises(AstraflowError, match=r"there is no game .*nowhere.z8"):
            await world.reset({"game": "nowhere.z8"}, 1)
    assert game.stat().st_mtime_ns == made


async def test_textworld_express_plays_a_game_to_its_end(games):
    async with world_of("textworld_express", games) as world:
        assert "take coin" in await world.reset({}, 3)
        step = await world.step("take coin")
        assert (step.reward, step.is_done, step.metrics["won"]) == (1.0, True, 1.0)
        assert await world.reset({"fold": "test"}, 3)


@pytest.fixture
def kitchen(tmp_path):
    """Return a folder with one game of ALFWorld."""
    maker = Path(__file__).with_name("alfworld_game.py")
    subprocess.run([interpreter("alfworld"), maker, tmp_path / "kitchen"], check=True)
    return tmp_path


async def test_alfworld_plays_the_games_of_a_folder(kitchen):
    options = {"folder": str(kitchen)}
    async with pool_of("alfworld", options, "alfworld") as pool, pool.open() as world:
        first = await world.reset({"seed": 5}, 5)
        assert "Your task is to: put a apple in fridge." in first
        assert "You can: go to cabinet 1, go to countertop 1" in first
        assert "Nothing happens" in (await world.step("dance")).observation
        for action in (
            "go to countertop 1",
            "take apple 1 from countertop 1",
            "go to fridge 1",
            "open fridge 1",
        ):
            assert (await world.step(action)).reward == 0
        step = await world.step("move apple 1 to fridge 1")
        assert (step.reward, step.is_done, step.metrics["won"]) == (1.0, True, 1.0)
        # A row may name the game.
        game = {"game": str(kitchen / "kitchen" / "game.tw-pddl")}
        assert await world.reset(game, 1) == first


async def test_alfworld_without_games_says_so():
    options = {"folder": "/nowhere"}
    async with pool_of("alfworld", options, "alfworld") as pool, pool.open() as world:
        with pytest.raises(AstraflowError, match=r"no game.tw-pddl below /nowhere"):
            await world.reset({}, 1)


@pytest.fixture
def openenv_url():
    """Run a server of OpenEnv, and return where it is."""
    script = Path(__file__).with_name("openenv_server.py")
    command = [interpreter("openenv"), script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        yield f"http://127.0.0.1:{server.stdout.readline().strip()}"
        server.terminate()


async def test_openenv_plays_with_a_server(openenv_url):
    options = {"url": openenv_url, "action": "word", "observation": "text"}
    soft = {**options, "fields": {"tone": "soft"}}
    async with (
        pool_of("openenv", soft, "openenv") as pool,
        pool.open() as world,
        pool.open() as neighbour,
    ):
        assert await world.reset({}, 2) == "Say drawer backwards."
        assert await neighbour.reset({"options": {"word": "ten"}}, 2) == "Say ten backwards."
        step = await world.step("drawer")
        assert (step.observation, step.reward, step.is_done) == ("No.", 0.0, False)
        step = await world.step("reward")
        assert (step.observation, step.reward, step.is_done) == ("Yes.", 1.0, True)
        assert (await neighbour.step("net")).reward == 1.0
    wrong = {**options, "observation": "sound"}
    async with pool_of("openenv", wrong, "openenv") as pool, pool.open() as world:
        with pytest.raises(AstraflowError, match="no text 'sound'"):
            await world.reset({}, 2)


async def test_openenv_without_a_server_may_be_tried_again():
    options = {"url": "http://127.0.0.1:9"}
    async with pool_of("openenv", options, "openenv") as pool, pool.open() as world:
        with pytest.raises(AstraflowError, match="Failed to connect") as caught:
            await world.reset({}, 1)
    assert (caught.value.reason, caught.value.retryable) == (Reason.ENVIRONMENT_FAILED, True)
