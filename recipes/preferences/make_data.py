"""Writes train.jsonl and held_out.jsonl: letters to sort, with a right and a wrong answer to each.

    python recipes/preferences/make_data.py

What is wrong is descending, as it came, or lacks a letter, as the tutor of letter sort errs.
Whether letters are held out is decided by a digest of them alone.
"""

import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from letter_sort import draw_letters, is_held_out, sort_letters  # noqa: E402

COUNTS = {"train": 4096, "held_out": 512}


def wrong(letters: str, rng: np.random.Generator) -> str:
    right = sort_letters(letters)
    at = int(rng.integers(len(right)))
    others = [right[::-1], letters, right[:at] + right[at + 1 :]]
    return str(rng.choice([each for each in others if each != right]))


def rows(*, held_out: bool) -> Iterator[dict[str, str]]:
    """Yield pairs, letters once each."""
    rng, seen = np.random.default_rng(int(held_out)), set()
    while True:
        letters = draw_letters(rng)
        if letters in seen or is_held_out(letters) != held_out or len(set(letters)) == 1:
            continue
        seen.add(letters)
        yield {
            "id": letters,
            "prompt": f"{letters}>",
            "answer": sort_letters(letters),
            "chosen": sort_letters(letters),
            "rejected": wrong(letters, rng),
        }


def main() -> None:
    for name, count in COUNTS.items():
        lines = [json.dumps(row) + "\n" for row in islice(rows(held_out=name == "held_out"), count)]
        (HERE / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
