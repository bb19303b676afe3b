"""Writes train.jsonl, held_out.jsonl and demonstrations.jsonl: problems of three kinds.

    pip install reasoning-gym==0.1.25
    python recipes/math-efficient-data/make_data.py

easy: sort three numbers; demonstrations are right, and the warmed-up model solves nearly all.
middle: sort five; demonstrations are right three times in ten, else in descending order, as they
came, or without one of them.
hopeless: products of two digits each; demonstrations are right, but the model is too small to
learn more of them than what an answer looks like.

Whether a problem is held out is decided by a digest of it alone: it is then in neither the training
rows nor the demonstrations.
"""

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

import reasoning_gym

HERE = Path(__file__).parent
TRAIN_COUNTS = {"easy": 40, "middle": 20, "hopeless": 40}
HELD_OUT_COUNTS = {"easy": 80, "middle": 80, "hopeless": 80}
DEMONSTRATION_COUNTS = {"easy": 4000, "middle": 2500, "hopeless": 500}
HELD_OUT_SHARE = 0.2
RIGHT_SHARE = 0.3


def problems(kind: str) -> Iterator[dict[str, str]]:
    """Yield problems of a kind, in the same order every time; some come again."""
    if kind == "hopeless":
        settings = {"min_digits": 2, "max_digits": 2}
        for item in reasoning_gym.create_dataset("products", seed=0, size=8192, **settings):
            yield {
                "kind": kind,
                "problem": item["metadata"]["expression"],
                "answer": item["answer"],
            }
        return
    count = 3 if kind == "easy" else 5
    settings = {"min_numbers": count, "max_numbers": count, "min_value": 0, "max_value": 9,
                "min_decimals": 0, "max_decimals": 0}  # fmt: skip
    for item in reasoning_gym.create_dataset("number_sorting", seed=0, size=8192, **settings):
        numbers = [str(int(float(each))) for each in item["metadata"]["original_numbers"]]
        # Its own question has 900 characters.
        yield {"kind": kind, "problem": f"sort {' '.join(numbers)}", "answer": in_order(numbers)}


def in_order(numbers: list[str]) -> str:
    return " ".join(sorted(numbers, key=int))


def is_held_out(problem: str) -> bool:
    digest = hashlib.sha256(problem.encode()).digest()
    return int.from_bytes(digest[:4]) < HELD_OUT_SHARE * 2**32


def distinct(kind: str, count: int, *, held_out: bool) -> list[dict[str, str]]:
    rows = {
        row["problem"]: row for row in problems(kind) if is_held_out(row["problem"]) == held_out
    }
    if len(rows) < count:
        raise ValueError(f"only {len(rows)} {kind} problems, not {count}; lower the counts")
    return list(rows.values())[:count]


def demonstration(row: dict[str, str], dice: random.Random) -> dict[str, str]:
    answer = row["answer"]
    if row["kind"] == "middle" and dice.random() >= RIGHT_SHARE:
        answer = wrong(row["problem"].removeprefix("sort "), answer, dice)
    return {"prompt": f"{row['problem']} =", "completion": f" {answer}"}


def wrong(numbers: str, right: str, dice: random.Random) -> str:
    lost = right.split()
    lost.pop(dice.randrange(len(lost)))
    return dice.choice([" ".join(reversed(right.split())), numbers, " ".join(lost)])


def write(name: str, rows: list[dict[str, str]]) -> None:
    (HERE / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    for name, counts, held_out in (
        ("train.jsonl", TRAIN_COUNTS, False),
        ("held_out.jsonl", HELD_OUT_COUNTS, True),
    ):
        rows = [distinct(kind, count, held_out=held_out) for kind, count in counts.items()]
        write(name, [row for some in rows for row in some])
    dice = random.Random(0)  # noqa: S311 - problems are no secrets
    shown = [
        demonstration(row, dice)
        for kind, count in DEMONSTRATION_COUNTS.items()
        for row in [row for row in problems(kind) if not is_held_out(row["problem"])][:count]
    ]
    dice.shuffle(shown)
    write("demonstrations.jsonl", shown)


if __name__ == "__main__":
    main()
