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


def test_the_solver_is_shown_answers_that_are_right_a_third_of_the_time():
    rows = rows_of("solver.jsonl")
    right = [int(row["completion"]) == value(first_problem(row["prompt"])) for row in rows]
    assert 0.32 < sum(right) / len(rows) < 0.38
    retries = [row for row in rows if "REJECT" in row["prompt"]]
    assert 0.15 < len(retries) / len(rows) < 0.25
    for row in retries:
        first, again = row["prompt"].split("<|im_end|> REJECT ")
        problem, given = first.split(" = ")
        assert int(given) != value(problem)
        assert again == f"{problem} ="


def test_the_verifier_is_shown_verdicts_that_are_true_four_times_in_five():
    true = 0
    rows = rows_of("verifier.jsonl")
    for row in rows:
        problem, given = row["prompt"].removesuffix(" ?").split(" = ")
        is_right = int(given) == value(problem)
        true += row["completion"] == (" APPROVE" if is_right else " REJECT")
    assert 0.77 < true / len(rows) < 0.83


@pytest.mark.parametrize("name", ["cpu", "gpu-8", "gpu-2x8"])
def test_a_recipe_is_accepted(name, tmp_path):
    report = check_recipe(
        FOLDER / f"{name}.yaml", runs=tmp_path, is_elsewhere="gpu" in name, limit_s=60.0
    )
    assert report.errors == []
