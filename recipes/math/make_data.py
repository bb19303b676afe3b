"""Writes train.jsonl and held_out.jsonl from chain_sum of reasoning-gym.

    pip install reasoning-gym==0.1.25
    python recipes/math/make_data.py

The problems are sums and differences of two numbers of two digits in which no digit carries: hard
enough for a model of 135 M parameters, and right often enough to learn from. Whether one is held
out is decided by a digest of it alone, so both files hold the same mix and no problem is in both.
"""

import hashlib
import json
from pathlib import Path

import reasoning_gym

HERE = Path(__file__).parent
TRAIN_COUNT, HELD_OUT_COUNT = 1536, 256
# Of all problems.
HELD_OUT_SHARE = 0.2


def carries(expression: str) -> bool:
    """Whether a digit of `ab + cd` is above 9, or one of `ab - cd` below 0."""
    left, sign, right = expression.split()
    pairs = [(int(a), int(b)) for a, b in zip(left, right, strict=True)]
    return any(a + b > 9 if sign == "+" else a < b for a, b in pairs)


def is_held_out(expression: str) -> bool:
    digest = hashlib.sha256(expression.encode()).digest()
    return int.from_bytes(digest[:4]) < HELD_OUT_SHARE * 2**32


def main() -> None:
    source = reasoning_gym.create_dataset(
        "chain_sum", seed=0, size=16384, min_terms=2, max_terms=2, min_digits=2, max_digits=2
    )
    rows: dict[bool, dict[str, str]] = {False: {}, True: {}}
    for item in source:
        problem = item["metadata"]["expression"]
        if not carries(problem):
            rows[is_held_out(problem)][problem] = item["answer"]
    for name, held_out, count in (
        ("train", False, TRAIN_COUNT),
        ("held_out", True, HELD_OUT_COUNT),
    ):
        lines = [
            json.dumps({"problem": problem, "answer": answer})
            for problem, answer in rows[held_out].items()
        ]
        (HERE / f"{name}.jsonl").write_text("\n".join(lines[:count]) + "\n")


if __name__ == "__main__":
    main()
