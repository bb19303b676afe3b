"""Writes the problems of solver and verifier, and what both are warmed up on: sums.

    pip install reasoning-gym==0.1.25
    python recipes/math-multi-agent/make_data.py

train.jsonl and held_out.jsonl: sums of two or three numbers of one digit.
solver.jsonl: sums with an answer that is right half of the time, else some numbers off. A
quarter of them come after a wrong answer that was rejected; then half of the answers are the
verifier's sum.
verifier.jsonl: sums with an answer, as often right as wrong. The verifier adds up itself, right
half of the time, and approves of what it has found itself.

Whether a sum is held out is decided by a digest of it alone: it is then in held_out.jsonl alone.
"""

import hashlib
import json
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import reasoning_gym

HERE = Path(__file__).parent
TRAIN_COUNT, HELD_OUT_COUNT, DEMONSTRATION_COUNT = 512, 128, 5200
HELD_OUT_SHARE = 0.2
RIGHT_SHARE, VERIFIER_RIGHT_SHARE, RETRY_SHARE, TRUST_SHARE = 0.5, 0.5, 0.25, 0.5
NEAR, FAR = (-2, -1, 1, 2), tuple(each for each in range(-12, 13) if each)
# Ends an answer in the solver's context, between its first attempt and what it hears about it.
END = "<|im_end|>"


def sums(*, held_out: bool, seed: int) -> Iterator[tuple[str, int]]:
    """Yield sums with their answers, in the same order every time; some come again."""
    made = reasoning_gym.create_dataset(
        "basic_arithmetic", seed=seed, size=1 << 16, min_terms=2, max_terms=3, min_digits=1,
        max_digits=1, operators=["+"], allow_parentheses=False, allow_negation=False,
    )  # fmt: skip
    for item in made:
        problem = item["metadata"]["expression"]
        if "10" not in problem and is_held_out(problem) == held_out:
            yield problem, int(item["answer"])


def is_held_out(problem: str) -> bool:
    digest = hashlib.sha256(problem.encode()).digest()
    return int.from_bytes(digest[:4]) < HELD_OUT_SHARE * 2**32


def rows(count: int, *, held_out: bool) -> list[dict[str, str]]:
    distinct: dict[str, int] = {}
    for problem, answer in sums(held_out=held_out, seed=0):
        distinct[problem] = answer
        if len(distinct) == count:
            break
    return [{"problem": problem, "answer": str(answer)} for problem, answer in distinct.items()]


def wrong(answer: int, dice: random.Random) -> int:
    return answer + dice.choice(dice.choice([NEAR, FAR]))


def sloppy(answer: int, right_share: float, dice: random.Random) -> int:
    return answer if dice.random() < right_share else wrong(answer, dice)


def attempt(problem: str, answer: int, dice: random.Random) -> dict[str, str]:
    prompt, given = f"{problem} =", sloppy(answer, RIGHT_SHARE, dice)
    if dice.random() < RETRY_SHARE:
        found = sloppy(answer, VERIFIER_RIGHT_SHARE, dice)
        prompt += f" {wrong(answer, dice)}{END} {found} REJECT {problem} ="
        given = found if dice.random() < TRUST_SHARE else given
    return {"prompt": prompt, "completion": f" {given}"}


def verdict(problem: str, answer: int, dice: random.Random) -> dict[str, str]:
    given = sloppy(answer, 0.5, dice)
    found = sloppy(answer, VERIFIER_RIGHT_SHARE, dice)
    word = "APPROVE" if found == given else "REJECT"
    return {"prompt": f"{problem} = {given} ?", "completion": f" {found} {word}"}


def write(name: str, rows: list[dict[str, str]]) -> None:
    (HERE / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    write("train.jsonl", rows(TRAIN_COUNT, held_out=False))
    write("held_out.jsonl", rows(HELD_OUT_COUNT, held_out=True))
    for name, show in (("solver.jsonl", attempt), ("verifier.jsonl", verdict)):
        dice = random.Random(name)  # noqa: S311 - problems are no secrets
        shown = islice(sums(held_out=False, seed=1), DEMONSTRATION_COUNT)
        write(name, [show(problem, answer, dice) for problem, answer in shown])


if __name__ == "__main__":
    main()
