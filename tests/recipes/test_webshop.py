"""The shop of recipes/webshop, with WebShop's actions and reward."""

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from astraflow.workflows.environments.pool import EnvironmentPool, PoolOptions

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "recipes" / "webshop"
GOAL = {
    "query": "desk lamp",
    "category": ["lighting", "desk lamp"],
    "title": "Alder desk lamp, dimmable",
    "attributes": ["dimmable", "solid wood"],
    "options": {"color": "white", "light": "warm"},
    "price": 50,
    "instruction": "Find me a lamp.",
}
LAMP = {
    "id": "B1",
    "query": "desk lamp",
    "category": ["lighting", "desk lamp"],
    "title": "Brook desk lamp, dimmable",
    "price": 49.99,
    "attributes": ["dimmable"],
    "features": ["It is made of solid wood."],
    "description": "A lamp.",
    "options": {"color": ["white"], "light": ["warm", "cold"]},
}


@pytest.fixture
def shop(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("recipes.webshop.shop")


def buttons(page):
    return re.findall(r"click\[(.*?)\]", page.splitlines()[-1])


@pytest.mark.parametrize(
    ("changes", "chosen", "reward"),
    [
        ({}, {"color": "white", "light": "warm"}, 1.0),
        ({}, {"color": "white", "light": "cold"}, 4 / 5),
        ({"price": 50.01}, {}, 2 / 5),
        # The texts are read, too: "solid wood" stands in the features alone.
        ({"features": []}, {"color": "white", "light": "warm"}, 4 / 5),
        # Another kind of thing with a title that is alike in one word of four.
        (
            {"query": "tea", "category": ["groceries", "tea"], "title": "Dale green tea, dimmable"},
            {"color": "white", "light": "warm"},
            1.0,
        ),
        ({"title": "Brook green tea"}, {"color": "white", "light": "warm"}, 0.0),
    ],
)
def test_the_reward_is_webshops(shop, changes, chosen, reward):
    parts = shop.reward_of(GOAL, {**LAMP, **changes}, chosen)
    assert parts["reward"] == pytest.approx(reward)


def test_without_a_price_limit_there_is_no_part_for_it(shop):
    parts = shop.reward_of({**GOAL, "price": None}, LAMP, {"color": "white"})
    assert parts["reward"] == pytest.approx(3 / 4)


def test_what_is_asked_for_can_be_bought(shop):
    world = shop.Shop(str(FOLDER / "products.jsonl"))
    for seed in range(5):
        said = world.reset({"seed": seed}, seed)
        assert said.startswith("Find me ")
        assert said == world.reset({"seed": seed}, seed)
        goal = world.goal
        pages = world.step(f"search[{goal['title']} {' '.join(goal['attributes'])}]").observation
        wanted = next(
            each["id"].lower() for each in world.products if each["title"] == goal["title"]
        )
        assert wanted in buttons(pages)
        world.step(f"click[{wanted}]")
        for value in goal["options"].values():
            world.step(f"click[{value}]")
        step = world.step("I am done: click[Buy Now]")
        assert step.is_done
        assert step.reward > 0.5


def test_pages_are_turned_and_details_are_read(shop):
    world = shop.Shop(str(FOLDER / "products.jsonl"), per_page=2, pages=2)
    world.reset({"goal": GOAL}, 0)
    first = buttons(world.step("search[desk lamp]").observation)
    assert first[:2] == ["back to search", "next >"]
    second = buttons(world.step("click[Next >]").observation)
    assert second[:2] == ["back to search", "< prev"]
    assert not set(first[2:]) & set(second[2:])
    page = world.step(f"click[{second[2]}]").observation
    assert "buy now" in buttons(page)
    assert "It is" in world.step("click[features]").observation
    assert buttons(world.step("click[< prev]").observation) == second
    assert buttons(world.step("click[back to search]").observation) == []


def test_short_pages_have_numbers_to_click_and_no_list(shop):
    world = shop.Shop(is_short=True, per_page=3, pages=1)
    assert world.reset({"goal": GOAL}, 0) == GOAL["instruction"]
    page = world.step("search[desk lamp]").observation
    assert [line[:3] for line in page.splitlines()] == ["[1]", "[2]", "[3]"]
    second = page.splitlines()[1].removeprefix("[2] ")
    assert world.step("click[2]").observation.startswith(second)
    assert "There is no button 2." in world.step("click[2]").observation


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("buy it", "Write search[words] or click[button]."),
        ("click[buy now]", "There is no button buy now."),
        ("search[zzz]", "Nothing was found."),
    ],
)
def test_what_cannot_be_done_is_told(shop, action, said):
    world = shop.Shop(str(FOLDER / "products.jsonl"))
    world.reset({"goal": GOAL}, 0)
    step = world.step(action)
    assert said in step.observation
    assert (step.reward, step.is_done) == (0.0, False)


async def test_a_recipe_names_it_where_it_lies(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    options = {"products": str(FOLDER / "products.jsonl")}
    pool = EnvironmentPool(
        PoolOptions(environment="recipes.webshop.shop:Shop", environment_options=options, workers=1)
    )
    async with pool.open() as world:
        assert "You can: search[words]" in await world.reset({}, 3)
    await pool.close()


def test_the_products_are_what_the_script_makes(tmp_path):
    script = shutil.copy(FOLDER / "make_products.py", tmp_path)
    subprocess.run([sys.executable, script], check=True)
    made = (tmp_path / "products.jsonl").read_text("utf-8")
    assert made == (FOLDER / "products.jsonl").read_text("utf-8")
    assert len({json.loads(line)["id"] for line in made.splitlines()}) == 200


def test_demonstrations_are_what_the_sloppy_shopper_does(tmp_path):
    for name in ("make_demonstrations.py", "shop.py", "products.jsonl"):
        shutil.copy(FOLDER / name, tmp_path)
    done = subprocess.run(
        [sys.executable, tmp_path / "make_demonstrations.py"],
        check=True,
        capture_output=True,
        text=True,
    )
    made = (tmp_path / "demonstrations.jsonl").read_text("utf-8")
    assert made == (FOLDER / "demonstrations.jsonl").read_text("utf-8")
    exact = float(done.stdout.split()[-1])
    assert 0 < exact < 0.3
