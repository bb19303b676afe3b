"""Writes train.jsonl and held_out.jsonl: sums and differences of reasoning-gym's chain_sum.

A quarter of them are of one digit, the others of two.

    pip install reasoning-gym==0.1.25
    python recipes/math/make_data.py

Whether an expression is held out is decided by a digest of it alone, so both files hold the same
mix and no problem is in both.
"""

import hashlib
import json
from pathlib import Path

import reasoning_gym

HERE = Path(__file__).parent
TRAIN_COUNT, HELD_OUT_COUNT = 2048, 256
# Of all expressions.
HELD_OUT_SHARE = 0.2


def is_held_out(expression: str) -> bool:
    digest = hashlib.sha256(expression.encode()).digest()
    return int.from_bytes(digest[:4]) < HELD_OUT_SHARE * 2**32


def main() -> None:
    one, two = (
        reasoning_gym.create_dataset(
            "chain_sum", seed=0, size=4096, min_terms=2, max_terms=2, min_digits=n, max_digits=n
        )
        for n in (1, 2)
    )
    files = {False: HERE / "train.jsonl", True: HERE / "held_out.jsonl"}
    rows: dict[bool, list[str]] = {False: [], True: []}
    for index in range(len(one)):
        item = (one if index % 4 == 0 else two)[index]
        expression = item["metadata"]["expression"]
        row = {"problem": expression, "answer": item["answer"]}
        rows[is_held_out(expression)].append(json.dumps(row))
    for held_out, count in ((False, TRAIN_COUNT), (True, HELD_OUT_COUNT)):
        files[held_out].write_text("\n".join(rows[held_out][:count]) + "\n")


if __name__ == "__main__":
    main()
