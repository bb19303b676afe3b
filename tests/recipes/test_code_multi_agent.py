"""The workflow of recipes/code-multi-agent: who writes what, and is told and paid what."""

import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.tasks import SamplingParams
from astraflow.launch.check import check_recipe
from astraflow.testing import CharTokenizer, SmallEngine
from astraflow.workflows.building import build_scorer
from astraflow.workflows.episode import Episode
from astraflow.workflows.ports import PolicyPort
from astraflow.workflows.rewards.code import CaseVerdict, parse_tests
from astraflow.workflows.scoring import GuardedScorer
from made_up import made_up_task

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "recipes" / "code-multi-agent"
RIGHT = "```python\ndef f(x):\n    return x + 1\n```"
WRONG = "```python\ndef f(x):\n    return x\n```"
ROW = {
    "prompt": "Add one.",
    "solution": "def f(x):\n    return x + 1\n",
    "tests": {"fn_name": "f", "inputs": [[1], [5]], "outputs": [2, 6]},
}
VALID = '3: 4\n```json\n{"inputs": [[3], [0]], "outputs": [4, 1]}\n```'
INVALID = '```json\n{"inputs": [[3], [0]], "outputs": [3, 0]}\n```'
BLUNT = '```json\n{"inputs": [[3]], "outputs": [4]}\n```'


@pytest.fixture
def pair(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return import_module("coder_tester")


class Script:
    """Says one text after the other, and keeps what it was told."""

    def __init__(self, *texts):
        self.texts, self.told = list(texts), []

    def __call__(self, told):
        self.told.append(told)
        return self.texts.pop(0)


async def run(pair, coder, tester, *, row=ROW, **options):
    ports = {}
    for name, script in (("coder", coder), ("tester", tester)):
        engine = SmallEngine(answer=script)
        engine.version = 1
        sampling = SamplingParams(max_new_tokens=200, seed=1)
        ports[PolicyId(name)] = PolicyPort(
            policy_id=PolicyId(name), engine=engine, tokenizer=CharTokenizer(), sampling=sampling
        )
    task = made_up_task(row)
    test = {"messages": [{"role": "user", "content": "{problem}\n{program}\nCases."}]}
    scorer = build_scorer("code", {"time_s": 5, "ready": 0}, where="scorer_options")
    settings = pair.CoderTesterOptions(
        **{"test": test, "feedback": "\n{results}\nAgain.", "time_s": 5, "ready": 0, **options}
    )
    workflow = pair.CoderTester(settings, GuardedScorer(scorer, name="code"))
    episode = Episode(task=task, sample_index=0, policies=ports)
    try:
        score = await workflow.run(episode)
    finally:
        await workflow.close()
        await scorer.close()
    return score, {each.agent: each.reward for each in episode.trajectories()}


@pytest.mark.parametrize(
    ("first", "cases", "rewards"),
    [
        (RIGHT, VALID, {"coder": 1, "tester": 1}),
        # Valid, but one input of which a wrong program knows the answer: half.
        (WRONG.replace("x\n", "4\n"), VALID.replace("[0]", "[3]").replace(", 1]", ", 4]"),
         {"coder": 0, "tester": 0.5}),
        (WRONG, VALID, {"coder": 0, "tester": 1, "coder/2": 1}),
        # Cases that are wrong pay nothing, but the coder cannot know: it is told all the same.
        (RIGHT, INVALID, {"coder": 1, "tester": 0, "coder/2": 1}),
        (WRONG, INVALID, {"coder": 0, "tester": 0}),
        # Too few cases, or none, are no reason to try again.
        (WRONG, BLUNT, {"coder": 0, "tester": 0}),
        (WRONG, "I do not know.", {"coder": 0, "tester": 0}),
    ],
)  # fmt: skip
async def test_each_is_paid_for_its_own_work(pair, first, cases, rewards):
    score, got = await run(pair, Script(first, RIGHT), Script(cases))
    assert got == rewards
    assert score.reward == got.get("coder/2", got["coder"])
    assert score.metrics["retried"] == float("coder/2" in got)


async def test_the_second_attempt_follows_the_first_and_its_results(pair):
    coder = Script(WRONG, RIGHT)
    tester = Script(VALID)
    score, _ = await run(pair, coder, tester)
    assert tester.told[0].endswith("Add one.\ndef f(x):\n    return x\nCases.")
    assert coder.told[1].startswith(f"Add one.{WRONG}")
    assert coder.told[1].endswith(
        "\ninput 3, expected 4: FAIL: got 3\ninput 0, expected 1: FAIL: got 0\nAgain."
    )
    assert score.metrics == {
        "first_try": 0, "solved": 1, "retried": 1, "parsed": 1, "valid": 1, "diagnosed": 1,
    }  # fmt: skip


async def test_an_attempt_without_code_fails_all_cases(pair):
    coder = Script("No idea.", RIGHT)
    _, rewards = await run(pair, coder, Script(VALID))
    assert rewards == {"coder": 0, "tester": 1, "coder/2": 1}
    assert "FAIL: no_code" in coder.told[1]


async def test_the_first_solution_that_passes_is_the_reference(pair):
    row = {**ROW, "solution": [WRONG, RIGHT, "raise SystemExit"]}
    _, rewards = await run(pair, Script(RIGHT), Script(VALID), row=row)
    assert rewards["tester"] == 1
    with pytest.raises(AstraflowError) as caught:
        await run(pair, Script(RIGHT), Script(VALID), row={**ROW, "solution": []})
    assert caught.value.reason is Reason.SCORER_FAILED


@pytest.mark.parametrize(
    "inputs",
    [
        "[[NaN], [Infinity]]",
        '[["\\ud800"], [{}]]',
        "[[[[[[]]]]], [null]]",
        "[3, true]",
        '[{"a": 1}, 1e999]',
        f"[{'[' * 200}{']' * 200}, 1]",
        "[[1, 2, 3], []]",
    ],
)
async def test_strange_cases_are_a_reward_of_the_testers(pair, inputs):
    cases = f'```json\n{{"inputs": {inputs}, "outputs": [4, "\\ud800"]}}\n```'
    _, rewards = await run(pair, Script(RIGHT, RIGHT), Script(cases))
    assert rewards["coder"] == 1
    assert rewards["tester"] == 0


async def test_programs_that_read_and_write_are_tested_too(pair):
    row = {
        "prompt": "Add one.",
        "solution": "print(int(input()) + 1)",
        "tests": {"inputs": ["1"], "outputs": ["2"]},
    }
    cases = '```json\n{"inputs": ["3", "0"], "outputs": ["4", "1"]}\n```'
    coder = Script("```python\nprint(input())\n```", "```python\nprint(int(input()) + 1)\n```")
    _, rewards = await run(pair, coder, Script(cases), row=row)
    assert rewards == {"coder": 0, "tester": 1, "coder/2": 1}
    assert "input 3, expected 4: FAIL: got '3'" not in coder.told[1]
    assert "input 3, expected 4: FAIL: got 3" in coder.told[1]


def test_examples_are_left_out_of_what_a_tester_reads(pair):
    told = "Add all numbers of the list.\n\nExample 1:\n1 2\n3\n\nConstraints:\nAt most ten.\n"
    assert pair.without_examples(told) == (
        "Add all numbers of the list.\n\nConstraints:\nAt most ten.\n"
    )
    assert pair.without_examples("Examples\n" + "1 2 3\n" * 9) == "Examples\n" + "1 2 3\n" * 9
    assert pair.without_examples("For example, this.\nMore.") == "For example, this.\nMore."


def test_results_are_a_line_for_each_case(pair):
    cases = parse_tests({"fn_name": "f", "inputs": [[1, "a"], [2, "b"]], "outputs": [1, None]})
    verdicts = [
        CaseVerdict(is_passed=True, why="passed"),
        CaseVerdict(is_passed=False, why="crash", error="Traceback …\nNameError: no y"),
    ]
    assert pair.shown_results(cases, verdicts).splitlines() == [
        "input 1, 'a', expected 1: PASS",
        "input 2, 'b', expected None: FAIL: crash NameError: no y",
    ]


def test_the_files_are_what_the_script_makes(tmp_path):
    made = tmp_path / "code-multi-agent"
    shutil.copytree(FOLDER, made, ignore=shutil.ignore_patterns("*.jsonl"))
    shutil.copytree(ROOT / "recipes" / "code", tmp_path / "code")
    path = os.pathsep.join([str(ROOT), str(ROOT / "gen")])
    env = {**os.environ, "PYTHONPATH": path}
    subprocess.run([sys.executable, made / "make_data.py"], check=True, env=env)
    for name in ("train", "held_out", "coder_demonstrations", "tester_demonstrations"):
        assert (made / f"{name}.jsonl").read_bytes() == (FOLDER / f"{name}.jsonl").read_bytes()


@pytest.mark.parametrize("name", ["cpu", "gpu-8", "gpu-2x8"])
def test_its_recipes_are_sound(name, tmp_path):
    report = check_recipe(
        FOLDER / f"{name}.yaml", runs=tmp_path, is_elsewhere=name != "cpu", limit_s=60.0
    )
    assert report.errors == []
