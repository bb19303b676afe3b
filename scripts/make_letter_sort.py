"""Writes the prompts of the letter-sort recipes; the same ones every time."""

import json
from pathlib import Path

from astraflow.workflows.letter_sort import prompt_rows

_FOLDER = Path(__file__).parents[1] / "recipes" / "letter_sort"
_SEED = 0
_COUNTS = {"train": 4096, "held_out": 2048}


def main() -> None:
    """Write `train.jsonl` and `held_out.jsonl`."""
    _FOLDER.mkdir(parents=True, exist_ok=True)
    for name, count in _COUNTS.items():
        rows = prompt_rows(count, held_out=name == "held_out", seed=_SEED)
        lines = [json.dumps(row) + "\n" for row in rows]
        (_FOLDER / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
