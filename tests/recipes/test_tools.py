"""The desk of recipes/tools: calls are executed, answers are judged."""

import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from astraflow.workflows.data_sets import JsonLines

FOLDER = Path(__file__).parents[2] / "recipes" / "tools"

ROW = {"kind": "total", "item": "lamp", "count": 3, "seed": 5}


@pytest.fixture
def tools(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return import_module("tool_desk")


def play(tools, row, *actions, **options):
    """Return the steps of an episode."""
    desk = tools.ToolDesk(**options)
    desk.reset(row, row["seed"])
    return [desk.step(action) for action in actions]


def told(step):
    (message,) = step.observation
    assert message["role"] == "tool"
    return message["content"]


def test_a_task_is_the_same_for_the_same_seed_and_another_for_another(tools):
    first, again, other = (tools.task_of(ROW, seed) for seed in (5, 5, 6))
    assert first == again
    assert first.price != other.price
    assert first.answer == 3 * first.price["lamp"]


@pytest.mark.parametrize("style", ["python", "json"])
@pytest.mark.parametrize("kind", ["price", "stock", "total", "both", "change", "rest"])
def test_who_makes_the_calls_and_answers_has_the_whole_reward(tools, style, kind):
    row = {**ROW, "kind": kind, "other": "cup"}
    task = tools.task_of(row, row["seed"])
    calls = [tools.write_call(call, style) for call in task.calls]
    steps = play(tools, row, *calls, f"That is {task.answer}.", style=style)
    assert sum(step.reward for step in steps) == pytest.approx(1)
    assert steps[-1].is_done
    assert steps[-1].metrics == {"right_answer": 1.0, "right_calls": 1.0, "wrong_calls": 0.0}
    assert told(steps[-2]) == str(task.answer)


def test_an_answer_that_was_guessed_is_worth_nothing(tools):
    task = tools.task_of(ROW, ROW["seed"])
    (step,) = play(tools, ROW, str(task.answer))
    assert (step.reward, step.is_done) == (0.0, True)


def test_a_right_call_before_a_wrong_answer_is_worth_its_share(tools):
    first, last = play(tools, ROW, "price(lamp)", "1000", call_share=0.4)
    assert (first.reward, last.reward) == (pytest.approx(0.2), 0.0)
    assert last.metrics["right_calls"] == 0.5


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("price(cup)", "error: no cup here"),
        ("weight(lamp)", "error: no tool weight"),
        ("price(3)", "error: wrong arguments for price"),
        ("times(3, lamp)", "error: wrong arguments for times"),
        ("times(3)", "error: wrong arguments for times"),
        ("times(3, 4)", "12"),
        ("I call plus(3, -4)", "-1"),
    ],
)
def test_what_a_call_returns_is_told(tools, action, said):
    (step,) = play(tools, ROW, action)
    assert told(step) == said
    assert (step.reward, step.is_done) == (0.0, False)
    assert step.metrics["wrong_calls"] == 1


@pytest.mark.parametrize(
    "body",
    [
        "{nonsense}",
        '{"name": "price"}',
        '{"name": "price", "arguments": [1]}',
        "{}",
        '{"name": "price", "arguments": {"item": %s}}' % (10_000 * "["),
    ],
)
def test_json_that_is_no_call_is_told(tools, body):
    (step,) = play(tools, ROW, f"<tool_call>{body}</tool_call>", style="json")
    assert told(step) == "error: write {name, arguments} as JSON"


def test_what_is_repeated_without_end_is_read_once(tools):
    long_word, opened = 200_000 * "a", 50_000 * "<tool_call>{"
    for style, said in (("python", long_word), ("json", opened)):
        (step,) = play(tools, ROW, said, style=style)
        assert (step.reward, step.is_done) == (0.0, True)
    call = '<tool_call>{"name": "price", "arguments": {"item": "lamp"}}</tool_call>'
    (step,) = play(tools, ROW, f"In <tool_call>{{: {call}", style="json")
    assert step.reward > 0


@pytest.mark.parametrize("word", [20_000 * "-" + "1", 5_000 * "9", 200 * "[", "nan"])
def test_what_a_policy_repeats_without_end_is_wrong_and_no_failure(tools, word):
    called, answered = play(tools, ROW, f"times(2, {word})", f"it is {5_000 * '9'}")
    assert told(called) == "error: wrong arguments for times"
    assert answered.is_done
    assert answered.reward == 0


def test_a_call_made_twice_counts_once(tools):
    first, second = play(tools, ROW, "price(lamp)", "price(lamp)")
    assert first.reward > 0
    assert second.reward == 0


def test_a_row_of_an_unknown_kind_is_refused(tools):
    with pytest.raises(ValueError, match="kind 'weight' is none of price, stock"):
        tools.task_of({"kind": "weight", "item": "lamp"}, 0)


def test_the_files_are_what_the_script_makes_and_nothing_held_out_is_trained_on(tmp_path):
    for name in ("make_data.py", "tool_desk.py"):
        shutil.copy(FOLDER / name, tmp_path)
    subprocess.run([sys.executable, tmp_path / "make_data.py"], check=True)
    for path in sorted(tmp_path.glob("*.jsonl")):
        assert path.read_text("utf-8") == (FOLDER / path.name).read_text("utf-8"), path.name
    for kind in ("", "gpu_"):
        train, held_out = (
            {row["item"] for row in JsonLines(FOLDER / f"{kind}{name}.jsonl")}
            for name in ("train", "held_out")
        )
        assert train
        assert held_out
        assert not train & held_out


def test_demonstrations_speak_as_the_desk_does(tools):
    desk = tools.ToolDesk()
    rows = JsonLines(FOLDER / "demonstrations.jsonl")
    for row in rows:
        for message in row["messages"]:
            if message["role"] == "assistant":
                assert tools.read_call(message["content"], "python") or message["content"].isdigit()
    assert desk.step("price(lamp)").observation == [
        {"role": "tool", "content": "error: no lamp here"}
    ]
