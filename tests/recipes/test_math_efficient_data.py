"""The files of recipes/math-efficient-data, and how compare.py reads runs."""

import importlib.util
import json
from collections import Counter
from pathlib import Path

import pytest
import yaml

from astraflow.launch.check import check_recipe

FOLDER = Path(__file__).parents[2] / "recipes" / "math-efficient-data"


@pytest.fixture(scope="module")
def compare():
    spec = importlib.util.spec_from_file_location("efficient_compare", FOLDER / "compare.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows_of(name):
    return [json.loads(line) for line in (FOLDER / name).read_text("utf-8").splitlines()]


def right_answer(problem):
    if problem.startswith("sort "):
        return " ".join(sorted(problem.removeprefix("sort ").split(), key=int))
    first, second = problem.split(" * ")
    return str(int(first) * int(second))


@pytest.mark.parametrize(
    ("name", "parts"), [("train.jsonl", (2, 1, 2)), ("held_out.jsonl", (1, 1, 1))]
)
def test_a_fifth_teaches_something_and_answers_are_right(name, parts):
    rows = rows_of(name)
    counts = Counter(row["kind"] for row in rows)
    share = len(rows) // sum(parts)
    kinds = ("easy", "middle", "hopeless")
    assert counts == {kind: share * part for kind, part in zip(kinds, parts, strict=True)}
    assert all(row["answer"] == right_answer(row["problem"]) for row in rows)
    assert len({row["problem"] for row in rows}) == len(rows)


def test_what_is_held_out_is_shown_and_trained_on_nowhere():
    held_out = {row["problem"] for row in rows_of("held_out.jsonl")}
    assert not held_out & {row["problem"] for row in rows_of("train.jsonl")}
    shown = {row["prompt"].removesuffix(" =") for row in rows_of("demonstrations.jsonl")}
    assert not held_out & shown


def test_demonstrations_of_the_middle_kind_alone_are_sloppy():
    right, count = Counter(), Counter()
    for row in rows_of("demonstrations.jsonl"):
        problem = row["prompt"].removesuffix(" =")
        kind = len(problem.split())
        count[kind] += 1
        right[kind] += row["completion"].strip() == right_answer(problem)
    share = {kind: right[kind] / count[kind] for kind in count}
    five_numbers = 1 + 5
    assert 0.27 < share.pop(five_numbers) < 0.33
    assert set(share.values()) == {1.0}


def test_both_recipes_differ_in_the_data_algorithms_alone():
    plain, efficient = (
        yaml.safe_load((FOLDER / f"{name}.yaml").read_text()) for name in ("plain", "cpu")
    )
    for recipe in (plain, efficient):
        del recipe["name"], recipe["rollouts"]["selectors"]
        # How long each goes on, and how often it is measured.
        del (
            recipe["policies"]["solver"]["trainer"]["step_count"],
            recipe["evals"]["held_out"]["every"],
        )
    del efficient["rollouts"]["filters"], efficient["policies"]["solver"]["trainer"]["replay"]
    assert plain == efficient


def test_a_curve_is_by_rollouts_that_were_asked_for(compare, tmp_path):
    steps = [
        {"step": 1, "data/select/seen": 6, "data/select/skipped": 0},
        {"step": 2, "data/select/seen": 12, "data/select/skipped": 2},
    ]
    evals = [
        {"versions": {"solver": version}, "overall": {"mean_reward": reward}}
        for version, reward in ((2, 0.75), (0, 0.25))
    ]
    for name, rows in (("metrics.jsonl", steps), ("evals.jsonl", evals)):
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
    assert compare.read_curve(tmp_path) == [(0, 0.25), (80, 0.75)]


def test_rollouts_until_an_accuracy_are_interpolated(compare):
    curve = [(0, 0.2), (100, 0.4), (200, 0.3), (300, 0.6)]
    assert compare.used_until(curve, 0.1) == 0
    assert compare.used_until(curve, 0.3) == pytest.approx(50)
    assert compare.used_until(curve, 0.5) == pytest.approx(200 + 100 * 2 / 3)
    assert compare.used_until(curve, 0.7) is None


def test_curves_are_smoothed_on_both_axes_and_averaged_where_all_are_known(compare):
    assert compare.smooth([(0, 0.0), (10, 0.3), (20, 0.6), (60, 0.9)]) == [
        (10, pytest.approx(0.3)),
        (30, pytest.approx(0.6)),
    ]
    mean = compare.mean_curve([[(0, 0.0), (10, 1.0), (20, 1.0)], [(5, 0.0), (15, 1.0), (25, 1.0)]])
    assert mean == [(5, 0.25), (10, 0.75), (15, 1.0)]


@pytest.mark.parametrize("name", ["plain", "cpu", "gpu-8", "gpu-2x8"])
def test_a_recipe_is_accepted(name, tmp_path):
    report = check_recipe(
        FOLDER / f"{name}.yaml", runs=tmp_path, is_elsewhere="gpu" in name, limit_s=60.0
    )
    assert report.errors == []
