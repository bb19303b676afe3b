"""The corpus and the questions of recipes/search, made from a package that ships facts."""

import json
from pathlib import Path

import pytest

from astraflow.workflows.environments.search import Search

FOLDER = Path(__file__).parents[2] / "recipes" / "search"


def rows_of(name):
    return [json.loads(line) for line in (FOLDER / name).read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def world():
    return Search(str(FOLDER / "corpus.jsonl"))


@pytest.mark.parametrize("name", ["train.jsonl", "held_out.jsonl"])
def test_what_is_asked_can_be_found_and_answered(world, name):
    found = 0
    rows = rows_of(name)
    for row in rows:
        world.reset(row, 0)
        step = world.step(f"<search>{row['question']}</search>")
        found += row["answer"] in step.observation
        last = world.step(f"<answer>{row['answer']}</answer>")
        assert (last.reward, last.metrics["em"]) == (1.0, 1.0)
    assert found / len(rows) > 0.95


def test_no_country_is_asked_about_in_training_and_held_out():
    train, held_out = (
        {row["id"].split("/")[0] for row in rows_of(name)}
        for name in ("train.jsonl", "held_out.jsonl")
    )
    assert not train & held_out
    assert len(train | held_out) == len(rows_of("corpus.jsonl"))
