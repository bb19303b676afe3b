"""The small functions of recipes/code: what is asked for, what is right, what is held out."""

import json
import random
import shutil
import subprocess
import sys
from importlib import import_module
from itertools import islice
from pathlib import Path

import pytest

from astraflow.core.tasks import Prompt
from astraflow.launch.check import check_recipe
from astraflow.workflows.building import build_scorer

FOLDER = Path(__file__).parents[2] / "recipes" / "code"
FILES = ("train", "held_out", "demonstrations")


@pytest.fixture
def functions(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return import_module("small_functions")


def rows_of(name):
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]


def test_steps_become_words_and_a_program(functions):
    steps = [("add 3", "({} + 3)"), ("make it at least 2", "max({}, 2)")]
    assert functions.prompt_of("number", steps) == (
        'def f(x: int):\n    """Add 3, then make it at least 2."""'
    )
    source = functions.program_of("number", steps)
    assert source == "def f(x: int):\n    return max((x + 3), 2)\n"
    assert functions.outputs_of(source, [0, -9]) == [3, 2]
    assert functions.outputs_of(source.replace("):", ")"), [0]) is None


@pytest.mark.parametrize("kind", ["number", "text", "list"])
def test_the_tutor_is_right_three_times_in_ten(functions, kind):
    rng = random.Random(3)
    inputs = functions.KINDS[kind][3]
    shown = list(islice(functions.problems(kind, rng), 400))
    right = sum(
        functions.outputs_of(functions.demonstration(kind, steps, rng), inputs)
        == functions.outputs_of(functions.program_of(kind, steps), inputs)
        for steps in shown
    )
    assert 0.22 < right / len(shown) < 0.38


def test_no_held_out_problem_is_shown_or_trained_on():
    held_out = {row["prompt"] for row in rows_of("held_out")}
    shown = {row["messages"][0]["content"] for row in rows_of("demonstrations")}
    assert len(held_out) == 80
    assert not held_out & {row["prompt"] for row in rows_of("train")}
    assert not held_out & shown


def test_the_files_are_what_the_script_makes(tmp_path):
    for name in ("make_data.py", "small_functions.py"):
        shutil.copy(FOLDER / name, tmp_path)
    subprocess.run([sys.executable, tmp_path / "make_data.py"], check=True)
    for name in FILES:
        made = (tmp_path / f"{name}.jsonl").read_bytes()
        assert made == (FOLDER / f"{name}.jsonl").read_bytes()


async def test_solutions_pass_their_tests_in_the_sandbox():
    options = {"partial": True, "time_s": 5}
    scorer = build_scorer("code", options, where="scorer_options")
    for row in rows_of("held_out")[:6]:
        prompt = Prompt(prompt_id="held_out/0", data_set="held_out", fields=row)
        assert (await scorer(prompt, f"```python\n{row['solution']}```")).reward == 1
    nothing = "```python\ndef f(x: int):\n    x\n```"
    assert (await scorer(prompt, nothing)).reward == 0
    await scorer.close()


@pytest.mark.parametrize("name", ["cpu", "gpu-8", "gpu-2x8"])
def test_its_recipes_are_sound(name, tmp_path):
    report = check_recipe(
        FOLDER / f"{name}.yaml", runs=tmp_path, is_elsewhere=name != "cpu", limit_s=60.0
    )
    assert report.errors == []
