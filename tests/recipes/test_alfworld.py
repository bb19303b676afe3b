"""The household of recipes/alfworld, against the rules and against ALFWorld's own engine."""

import json
import os
import random
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from astraflow.launch.check import Severity, check_recipe

FOLDER = Path(__file__).parents[2] / "recipes" / "alfworld"
ENGINE = Path(__file__).with_name("alfworld_engine.py")


@pytest.fixture
def household(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return import_module("household")


def enter(household, **room):
    """Return a household with a room of the test's own, and its player in the middle."""
    world = household.Household()
    world.room = household.Room(**{"thing": "apple", "target": "fridge", **room})
    return world


def rows(name):
    return [json.loads(line) for line in (FOLDER / name).read_text("utf-8").splitlines()]


def test_a_task_is_done_by_finding_the_thing_and_putting_it_where_it_belongs(household):
    world = enter(household, contents={"drawer 1": ["apple 1", "pen 1"], "fridge 1": []})
    said = [
        ("go to drawer 1", "You arrive at drawer 1. The drawer 1 is closed."),
        (
            "open drawer 1",
            "You open the drawer 1. The drawer 1 is open. In it, you see a apple 1, and a pen 1.",
        ),
        ("take apple 1 from drawer 1", "You pick up the apple 1 from the drawer 1."),
        ("inventory", "You are carrying: a apple 1."),
        ("Go to  fridge 1", "You arrive at fridge 1. The fridge 1 is closed."),
        ("move apple 1 to fridge 1", "Nothing happens."),
        ("open fridge 1", "You open the fridge 1. The fridge 1 is open. In it, you see nothing."),
    ]
    for action, observation in said:
        step = world.step(action)
        assert (step.observation, step.reward, step.is_done) == (observation, 0.0, False)
    step = world.step("move apple 1 to fridge 1")
    assert (step.reward, step.is_done, step.metrics) == (1.0, True, {"won": 1.0})


@pytest.mark.parametrize(
    "action",
    [
        "open fridge 1",  # from afar
        "take apple 1 from drawer 1",
        "go to sofa 1",
        "examine drawer 1",
        "dance",
        "take",
        "",
    ],
)
def test_what_cannot_be_done_does_nothing(household, action):
    world = enter(household, contents={"drawer 1": ["apple 1"], "fridge 1": []})
    before = world.room.commands()
    assert world.step(action).observation == "Nothing happens."
    assert world.room.commands() == before


def test_one_thing_is_carried_at_a_time(household):
    world = enter(household, contents={"desk 1": ["apple 1", "pen 1"], "fridge 1": []})
    world.step("go to desk 1")
    world.step("take pen 1 from desk 1")
    assert world.step("take apple 1 from desk 1").observation == "Nothing happens."
    assert world.step("move pen 1 to desk 1").observation == "You move the pen 1 to the desk 1."


def test_rooms_are_those_of_their_seeds_and_never_won_at_the_beginning(household):
    world = household.Household(commands=True)
    for seed in range(50):
        first = world.reset({}, seed)
        assert not world.room.is_won
        assert first == world.reset({}, seed)
        assert "You can: go to " in first
    assert world.reset({"thing": "egg", "target": "desk"}, 1).count("put a egg in desk.") == 1
    with pytest.raises(ValueError, match="thing: 'cow' is none of apple,"):
        world.reset({"thing": "cow"}, 1)
    with pytest.raises(ValueError, match="2 to 6 receptacles"):
        household.Household(receptacles=9)


def test_held_out_tasks_are_never_trained_on(household):
    def tasks(name):
        return {(row["thing"], row["target"]) for row in rows(name)}

    train, held_out = tasks("train.jsonl"), tasks("held_out.jsonl")
    assert not train & held_out
    assert len(train | held_out) == len(household.THINGS) * len(household.RECEPTACLES)
    shown = (row["messages"][0]["content"] for row in rows("demonstrations.jsonl"))
    for first in shown:
        thing, _, target = first.partition("put a ")[2].rstrip(".").partition(" in ")
        assert (thing, target) in train


def test_the_files_are_what_the_script_makes(tmp_path):
    for name in ("household.py", "make_data.py"):
        shutil.copy(FOLDER / name, tmp_path)
    env = {**os.environ, "PYTHONPATH": str(FOLDER.parents[1])}
    subprocess.run([sys.executable, tmp_path / "make_data.py"], check=True, env=env)
    for name in ("demonstrations.jsonl", "train.jsonl", "held_out.jsonl"):
        assert (tmp_path / name).read_text("utf-8") == (FOLDER / name).read_text("utf-8")


@pytest.mark.parametrize("name", ["cpu", "gpu-8", "gpu-2x8"])
def test_the_recipes_can_be_run(name, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    report = check_recipe(
        FOLDER / f"{name}.yaml", runs=tmp_path, is_elsewhere=name != "cpu", limit_s=60.0
    )
    assert not [each for each in report.findings if each.severity is not Severity.NOTE]


@pytest.mark.slow
def test_the_engine_of_alfworld_says_the_same(household, tmp_path):
    """Twelve rooms, thirty commands each, drawn from those that both offer."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    python = Path(base, "astraflow", "environments", "alfworld", "bin", "python")
    if not python.exists():
        pytest.skip("alfworld is not installed; run scripts/install_environments.py alfworld")
    games = []
    for seed in range(12):
        world, rng = household.Household(commands=True), random.Random(seed)
        played = [["", world.reset({}, seed)]]
        room = world.room
        game = {"thing": room.thing, "target": room.target, "contents": dict(room.contents)}
        game["contents"] = {name: [*inside] for name, inside in room.contents.items()}
        for _ in range(30):
            action = rng.choice([*room.commands(), "dance"])
            step = world.step(action)
            played.append([action, step.observation])
            if step.is_done:
                break
        games.append({**game, "openable": sorted(household.OPENABLE), "played": played})
    file = tmp_path / "games.json"
    file.write_text(json.dumps(games))
    said = subprocess.run(
        [python, ENGINE, file, tmp_path], check=True, capture_output=True, text=True
    ).stdout
    assert json.loads(said.splitlines()[-1]) == [game["played"] for game in games]
