"""The questions of recipes/search can be answered from its corpus, in the ways it shows."""

import json
from importlib import import_module
from pathlib import Path

import pytest

from astraflow.config.loader import load_recipe
from astraflow.workflows.data_sets import JsonLines

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "recipes" / "search"


@pytest.fixture
def options(monkeypatch, tmp_path):
    """Options of the environment, wherever the recipe is started."""
    monkeypatch.chdir(tmp_path)
    return load_recipe(FOLDER / "cpu.yaml").workflows["ask"].options


@pytest.fixture
def search(options, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return import_module("retrieval").Search(**options["environment_options"])


def rows(name):
    return list(JsonLines(FOLDER / f"{name}.jsonl"))


def test_the_answer_of_a_held_out_question_is_in_the_best_passage_for_what_it_asks_about(search):
    found = 0
    for row in rows("held_out"):
        assert search.reset(row, 0).endswith(f"Question: {row['question']}")
        words = row["question"].rstrip("?").removesuffix(" called")
        step = search.step(f"<search>{words}</search>")
        found += row["answer"] in str(step.observation)
    # BM25 takes questions as they are, and some names stand in two documents.
    assert found / len(rows("held_out")) > 0.85


def test_the_example_of_the_prompt_is_what_search_says(search, options):
    example = options["environment_options"]["prompt"].split("\n\n")[0]
    question, query, *_ = example.splitlines()
    search.reset({"question": question, "answer": "Lima"}, 0)
    observation = search.step(query).observation
    assert observation in example
    assert search.step(example.splitlines()[-1]).reward == 1


def test_a_country_is_asked_about_in_one_file_only():
    documents = {json.dumps(row["contents"]) for row in rows("corpus")}
    asked = {name: {row["question"] for row in rows(name)} for name in ("train", "held_out")}
    assert len(documents) == len(rows("corpus"))
    assert len(asked["held_out"]) == len(rows("held_out"))
    capitals = {
        name: {row["answer"] for row in rows(name) if row["question"].startswith("What is the cap")}
        for name in asked
    }
    assert capitals["held_out"]
    assert not capitals["train"] & capitals["held_out"]
    assert not any("Peru" in question for part in asked.values() for question in part)
