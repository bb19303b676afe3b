"""Writes train.jsonl, held_out.jsonl and demonstrations.jsonl: tasks of one command, as Harbor's.

    python recipes/terminal/make_data.py [--folders DIRECTORY]

With --folders the tasks are also written as the task folders that they are. All files of a task's
place are compared in the end, so that a command that does more than was asked is wrong. Whether a
task is held out is decided by a digest of its instruction. Of the demonstrations three in ten are
right; in the others two names are swapped, the output goes nowhere, or another tool is taken.
"""

import argparse
import hashlib
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from harbor_tasks import row_of, task_of  # noqa: E402 - lies beside this file

TRAIN_COUNT, HELD_OUT_COUNT, DEMONSTRATION_COUNT = 160, 64, 900
HELD_OUT_SHARE, RIGHT_SHARE = 0.25, 0.3
NAMES = [
    f"{word}.txt"
    for word in [
        "pear",
        "plum",
        "lime",
        "kiwi",
        "fig",
        "nut",
        "oat",
        "rye",
        "tea",
        "cup",
        "jar",
        "pan",
    ]
]
LINES = ["red", "green", "blue", "white", "black", "gold"]

TOML = """schema_version = "1.4"

[task]
name = "astraflow/{name}"

[agent]
timeout_sec = 120.0

[verifier]
timeout_sec = 30.0
"""
DOCKERFILE = "FROM debian:12-slim\nWORKDIR /app\nCOPY files/ ./\n"
TEST = """#!/bin/bash
cd /app
for name in *; do
  if [ -d "$name" ]; then echo "$name/"; else sed "s|^|$name: |" "$name"; fi
done > /tmp/found.txt
diff /tests/expected.txt /tmp/found.txt && reward=1 || reward=0
echo $reward > /logs/verifier/reward.txt
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chore:
    """One command to be given.

    Attributes:
        instruction: What is asked.
        command: What does it.
        wrong: Commands that a sloppy tutor gives.
        before: Lines of files by name.
        after: The same when it is done; None: a folder.
    """

    instruction: str
    command: str
    wrong: tuple[str, ...]
    before: dict[str, list[str]]
    after: dict[str, list[str] | None]


def chore(kind: str, rng: random.Random) -> Chore:
    a, b, c = rng.sample(NAMES, 3)
    text = {name: [rng.choice(LINES) for _ in range(rng.randint(2, 4))] for name in (a, b)}
    folder = c.removesuffix(".txt")
    first, second = text[a], text[b]
    instruction, command, wrong, after = {
        "cat": (
            f"Join {a} and {b} into {c}.",
            f"cat {a} {b} > {c}",
            (f"cat {b} {a} > {c}", f"cat {a} {b}", f"cat {a} > {c}"),
            {c: first + second},
        ),
        "wc": (
            f"Write the number of lines of {a} to {c}.",
            f"wc -l < {a} > {c}",
            (f"wc -l < {c} > {a}", f"wc -l < {a}", f"wc -l {a} > {c}"),
            {c: [str(len(first))]},
        ),
        "head": (
            f"Write the first line of {a} to {c}.",
            f"head -n 1 {a} > {c}",
            (f"head -n 1 {c} > {a}", f"head -n 1 {a}", f"cat {a} > {c}"),
            {c: first[:1]},
        ),
        "rm": (f"Remove {a}.", f"rm {a}", (f"cat {a}", f"mkdir {a}", f"rm {c}"), {a: ...}),
        "mv": (
            f"Rename {a} to {c}.",
            f"mv {a} {c}",
            (f"mv {c} {a}", f"cat {a} > {c}", f"mv {a}"),
            {a: ..., c: first},
        ),
        "mkdir": (
            f"Make a folder {folder}.",
            f"mkdir {folder}",
            (f"mkdir {c}", f"cat > {folder}", f"rm {folder}"),
            {folder: None},
        ),
    }[kind]
    merged = {name: lines for name, lines in {**text, **after}.items() if lines is not ...}
    return Chore(instruction=instruction, command=command, wrong=wrong, before=text, after=merged)


def chores(*, held_out: bool, seed: int) -> Iterator[Chore]:
    """Yield chores without end, of all kinds in turn."""
    rng = random.Random(seed)  # noqa: S311
    while True:
        for kind in ("cat", "wc", "head", "rm", "mv", "mkdir"):
            made = chore(kind, rng)
            while is_held_out(made.instruction) != held_out:
                made = chore(kind, rng)
            yield made


def is_held_out(instruction: str) -> bool:
    digest = hashlib.sha256(instruction.encode()).digest()
    return int.from_bytes(digest[:4]) < HELD_OUT_SHARE * 2**32


def files_of(made: Chore, name: str) -> dict[str, bytes]:
    """Return the files of a task folder."""
    expected = [
        f"{each}/" if lines is None else "\n".join(f"{each}: {line}" for line in lines)
        for each, lines in sorted(made.after.items())
    ]
    files = {
        "task.toml": TOML.format(name=name),
        "instruction.md": f"{made.instruction}\n",
        "environment/Dockerfile": DOCKERFILE,
        "solution/solve.sh": f"#!/bin/bash\n{made.command}\n",
        "tests/test.sh": TEST,
        "tests/expected.txt": "".join(f"{line}\n" for line in expected),
    }
    for each, lines in made.before.items():
        files[f"environment/files/{each}"] = "".join(f"{line}\n" for line in lines)
    return {path: text.encode() for path, text in files.items()}


def main() -> None:
    """Write the files beside this one."""
    parser = argparse.ArgumentParser(description="Write the rows of recipes/terminal.")
    parser.add_argument("--folders", type=Path, help="write the tasks as folders there, too")
    given = parser.parse_args()
    for name, held_out, count in (
        ("train", False, TRAIN_COUNT),
        ("held_out", True, HELD_OUT_COUNT),
    ):
        rows: list[str] = []
        for number, made in enumerate(islice(chores(held_out=held_out, seed=0), count)):
            task_name = f"{name}-{number:03}"
            files = files_of(made, task_name)
            rows.append(json.dumps(row_of(task_of(task_name, files))))
            for path, data in files.items() if given.folders else ():
                place = given.folders / task_name / path
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(data)
        (HERE / f"{name}.jsonl").write_text("\n".join(rows) + "\n", "utf-8")
    rng = random.Random(1)  # noqa: S311
    chats: list[str] = []
    for made in islice(chores(held_out=False, seed=1), DEMONSTRATION_COUNT):
        is_right = rng.random() < RIGHT_SHARE
        said = made.command if is_right else rng.choice(made.wrong)
        turns = [
            {"role": "user", "content": made.instruction},
            {"role": "assistant", "content": said},
        ]
        chats.append(json.dumps({"messages": turns}))
    (HERE / "demonstrations.jsonl").write_text("\n".join(chats) + "\n", "utf-8")


if __name__ == "__main__":
    main()
