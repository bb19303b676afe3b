"""The files of recipes/math-multi-agent: what is held out, and what the demonstrators show."""

import json
import re
from pathlib import Path

import pytest

from astraflow.launch.check import check_recipe

FOLDER = Path(__file__).parents[2] / "recipes" / "math-multi-agent"


def rows_of(name):
    return [json.loads(line) for line in (FOLDER / name).read_text("utf-8").splitlines()]


def value(problem):
    return sum(int(each) for each in problem.split(" + "))


def first_problem(prompt):
    return re.match(r"[0-9 +]+(?= =)", prompt).group()


@pytest.mark.parametrize("name", ["train.jsonl", "held_out.jsonl"])
def test_answers_are_right_and_no_problem_comes_twice(name):
    rows = rows_of(name)
    assert all(int(row["answer"]) == value(row["problem"]) for row in rows)
    assert len({row["problem"] for row in rows}) == len(rows)


def test_what_is_held_out_is_shown_and_trained_on_nowhere():
    held_out = {row["problem"] for row in rows_of("held_out.jsonl")}
    assert not held_out & {row["problem"] for row in rows_of("train.jsonl")}
    for name in ("solver.jsonl", "verifier.jsonl"):
        assert not held_out & {first_problem(row["prompt"]) for row in rows_of(name)}


def test_the_solver_is_shown_answers_that_are_seldom_right_and_retries():
    first, retries = [], []
    for row in rows_of("solver.jsonl"):
        (retries if "REJECT" in row["prompt"] else first).append(row)
    right = [int(row["completion"]) == value(first_problem(row["prompt"])) for row in first]
    assert 0.47 < sum(right) / len(right) < 0.53
    assert 0.22 < len(retries) / (len(first) + len(retries)) < 0.28
    trusted = 0
    for row in retries:
        attempt, rest = row["prompt"].split("<|im_end|> ")
        problem, given = attempt.split(" = ")
        found, again = rest.split(" REJECT ")
        assert int(given) != value(problem)
        assert again == f"{problem} ="
        trusted += int(row["completion"]) == int(found)
    assert 0.5 < trusted / len(retries) < 0.75


def test_the_verifier_approves_of_what_it_has_found_itself():
    found_right = 0
    rows = rows_of("verifier.jsonl")
    for row in rows:
        problem, given = row["prompt"].removesuffix(" ?").split(" = ")
        found, word = row["completion"].split()
        assert word == ("APPROVE" if int(found) == int(given) else "REJECT")
        found_right += int(found) == value(problem)
    assert 0.47 < found_right / len(rows) < 0.53


@pytest.mark.parametrize("name", ["cpu", "gpu-8", "gpu-2x8"])
def test_a_recipe_is_accepted(name, tmp_path):
    report = check_recipe(
        FOLDER / f"{name}.yaml", runs=tmp_path, is_elsewhere="gpu" in name, limit_s=60.0
    )
    assert report.errors == []
