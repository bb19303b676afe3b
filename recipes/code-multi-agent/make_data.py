"""Writes the rows of coder and tester, and what a sloppy tutor shows each of them.

    python recipes/code-multi-agent/make_data.py

The problems are those of recipes/code on numbers; those of the runs have constants up to 4. Three
in ten of the coder's programs are right, at the first attempt and at the second. The tester shows
what each step makes of its inputs, then writes the cases; half of its answers are right. In the
others the last step is forgotten, the candidate is believed, a case is missing, or the JSON is
broken.
"""

import json
import random
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "code")]
from coder_tester import shown_results  # noqa: E402 - lies beside this file
from small_functions import (  # noqa: E402 - of recipes/code
    Step,
    demonstration,
    distinct,
    outputs_of,
    problem_of,
    program_of,
    prompt_of,
    rows_of,
)

from astraflow.workflows.rewards.code import CaseVerdict, parse_tests  # noqa: E402

TRAIN_COUNT, HELD_OUT_COUNT, CODER_COUNT, TESTER_COUNT = 110, 24, 800, 1000
TESTER_RIGHT_SHARE = 0.5
INPUTS = range(4)
RESULTS = "{results}\nAgain."


def number_problems(*, held_out: bool, seed: int) -> Iterator[tuple[str, list[Step]]]:
    return (row for row in rows_of(held_out=held_out, seed=seed) if row[0] == "number")


def easy_problems(*, held_out: bool, seed: int) -> Iterator[tuple[str, list[Step]]]:
    """Yield those whose results a small tester can work out."""
    return (
        (kind, steps)
        for kind, steps in number_problems(held_out=held_out, seed=seed)
        if all(words[-1] in "234" for words, _ in steps)
    )


def results_of(source: str, inputs: list[object], expected: list[object]) -> str:
    """Return what a coder is told of its program."""
    cases = {"fn_name": "f", "inputs": [[each] for each in inputs], "outputs": expected}
    got = outputs_of(source, inputs)
    verdicts = [
        CaseVerdict(is_passed=False, why="crash", error="SyntaxError: expected ':'")
        if got is None
        else CaseVerdict(is_passed=mine == right, why="wrong", got=str(mine))
        for mine, right in zip(got or expected, expected, strict=True)
    ]
    return shown_results(parse_tests(cases), verdicts)


def coder_chat(kind: str, steps: list[Step], rng: random.Random) -> list[dict[str, str]]:
    first, second = (demonstration(kind, steps, rng) for _ in range(2))
    inputs: list[object] = sorted(rng.sample(INPUTS, 2))
    expected = outputs_of(program_of(kind, steps), inputs)
    chat = [
        {"role": "user", "content": prompt_of(kind, steps)},
        {"role": "assistant", "content": f"```python\n{first}```"},
    ]
    if outputs_of(first, inputs) != expected:
        told = RESULTS.format(results=results_of(first, inputs, expected or []))
        chat += [
            {"role": "user", "content": told},
            {"role": "assistant", "content": f"```python\n{second}```"},
        ]
    return chat


def tester_chat(kind: str, steps: list[Step], rng: random.Random) -> list[dict[str, str]]:
    candidate = demonstration(kind, steps, rng)
    inputs: list[object] = rng.sample(INPUTS, 2)
    worked = [
        outputs_of(program_of(kind, steps[:count]), inputs) or []
        for count in range(1, len(steps) + 1)
    ]
    mistake = rng.choice(("last step", "candidate", "one case", "broken"))
    if rng.random() < TESTER_RIGHT_SHARE:
        mistake = ""
    if mistake == "last step":
        worked = worked[:-1] or [inputs]
    elif mistake == "candidate":
        worked = [outputs_of(candidate, inputs) or inputs]
    count = 1 if mistake == "one case" else 2
    lines = [f"{inputs[n]}: {', '.join(str(values[n]) for values in worked)}" for n in range(count)]
    made = {"inputs": [[each] for each in inputs[:count]], "outputs": worked[-1][:count]}
    text = json.dumps(made)
    if mistake == "broken":
        text = text.replace("]]", "]", 1)
    said = "\n".join([*lines, "```json", text, "```"])
    asked = f"{prompt_of(kind, steps)}\n{candidate.strip()}\nTwo cases."
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]


def write(name: str, rows: list[dict[str, object]]) -> None:
    (HERE / name).write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def main() -> None:
    """Write the files beside this one."""
    files = {"train": (False, TRAIN_COUNT), "held_out": (True, HELD_OUT_COUNT)}
    for name, (held_out, count) in files.items():
        chosen = distinct(easy_problems(held_out=held_out, seed=0), count)
        rows = [problem_of(kind, steps) for kind, steps in chosen]
        write(f"{name}.jsonl", rows)
    for name, chat_of, shown in (
        ("coder", coder_chat, islice(number_problems(held_out=False, seed=1), CODER_COUNT)),
        ("tester", tester_chat, islice(easy_problems(held_out=False, seed=1), TESTER_COUNT)),
    ):
        rng = random.Random(2)  # noqa: S311
        chats = [{"messages": chat_of(kind, steps, rng)} for kind, steps in shown]
        write(f"{name}_demonstrations.jsonl", chats)


if __name__ == "__main__":
    main()
