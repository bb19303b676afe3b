"""Writes train.jsonl, held_out.jsonl and demonstrations.jsonl: small functions to be written.

    python recipes/code/make_data.py

All files hold the same mix, and no held-out problem is in another file. The tutor of the
demonstrations is sloppy: three in ten of its programs are right; in the others the last step is
left out or comes first, nothing is returned, or the syntax is broken.
"""

import json
import random
import sys
from itertools import islice
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from small_functions import (  # noqa: E402 - lies beside this file
    demonstration,
    distinct,
    problem_of,
    prompt_of,
    rows_of,
)

TRAIN_COUNT, HELD_OUT_COUNT, DEMONSTRATION_COUNT = 320, 80, 1200


def write(name: str, rows: list[dict[str, object]]) -> None:
    (HERE / name).write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def main() -> None:
    """Write the files beside this one."""
    files = {"train": (False, TRAIN_COUNT), "held_out": (True, HELD_OUT_COUNT)}
    for name, (held_out, count) in files.items():
        chosen = distinct(rows_of(held_out=held_out, seed=0), count)
        rows = [{"kind": kind, **problem_of(kind, steps)} for kind, steps in chosen]
        write(f"{name}.jsonl", rows)
    rng = random.Random(1)  # noqa: S311
    chats: list[dict[str, object]] = []
    for kind, steps in islice(rows_of(held_out=False, seed=1), DEMONSTRATION_COUNT):
        said = f"```python\n{demonstration(kind, steps, rng)}```"
        turns = [
            {"role": "user", "content": prompt_of(kind, steps)},
            {"role": "assistant", "content": said},
        ]
        chats.append({"messages": turns})
    write("demonstrations.jsonl", chats)


if __name__ == "__main__":
    main()
