"""Writes demonstrations.jsonl, train.jsonl, held_out.jsonl, and gpu_*.jsonl: questions at a shop.

    python recipes/tools/make_data.py

Held-out questions are about other things than those trained on, in the same mix of kinds. The
demonstrator is sloppy: at every turn it is right 8 times in 10, else it takes another tool,
names another thing, or misreads a number. So a warmed-up model writes calls, but often wrong ones,
and rewards have something to choose from.
"""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from tool_desk import Call, task_of, write_call  # noqa: E402 - lies beside this file

SYSTEM = "Tools: price(item), stock(item), times(a, b)"
KINDS = ("price", "stock", "total")
GPU_KINDS = ("total", "both", "change", "rest")
# fmt: off
ITEMS = [
    "lamp", "cup", "book", "pen", "chair", "table", "clock", "phone", "ring", "boat", "bag", "hat",
    "coat", "shoe", "ball", "kite", "drum", "bell", "rope", "tent", "bowl", "plate", "spoon",
    "fork", "mirror", "basket", "candle", "pillow", "blanket", "carpet", "guitar", "camera",
]
HELD_OUT_ITEMS = [
    "bottle", "kettle", "jacket", "bike", "radio", "towel", "ladder", "hammer", "pencil", "button",
]
# fmt: on
SLOPPY = 0.2
TRAIN_COUNT, HELD_OUT_COUNT, DEMONSTRATION_COUNT = 1536, 128, 256


def questions(
    items: list[str], count: int, rng: random.Random, kinds: Sequence[str] = KINDS
) -> list[dict[str, object]]:
    """Return rows, every kind as often as another; a seed is used once."""
    rows: list[dict[str, object]] = []
    for number in range(count):
        kind = kinds[number % len(kinds)]
        row: dict[str, object] = {"kind": kind, "item": rng.choice(items)}
        if kind in ("total", "rest"):
            row["count"] = rng.randint(2, 9)
        if kind == "both":
            row["other"] = rng.choice([each for each in items if each != row["item"]])
        rows.append({**row, "seed": rng.randrange(2**31)})
    return rows


def demonstration(row: dict[str, object], rng: random.Random) -> list[dict[str, str]]:
    """Return a chat of the sloppy demonstrator, whose calls are answered as the desk does."""
    task = task_of(row, int(str(row["seed"])))
    chat = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": task.question},
    ]
    result = 0
    for call in task.calls:
        made = _other(call, rng) if rng.random() < SLOPPY else call
        if made.name == "times":
            result = int(made.arguments[0]) * int(made.arguments[1])
        else:
            table = task.price if made.name == "price" else task.stock
            result = table.get(str(made.arguments[0]), 0)
        said = str(result) if result else f"error: no {made.arguments[0]} here"
        chat += [
            {"role": "assistant", "content": write_call(made, "python")},
            {"role": "tool", "content": said},
        ]
        if not result:
            break
    answer = rng.randint(2, 60) if rng.random() < SLOPPY else result
    return [*chat, {"role": "assistant", "content": str(answer)}]


def _other(call: Call, rng: random.Random) -> Call:
    """Return a call that is not the right one."""
    if call.name == "times":
        return Call("times", (call.arguments[0], rng.randint(2, 9)))
    if rng.random() < 0.5:
        return Call(call.name, (rng.choice(ITEMS),))
    return Call("stock" if call.name == "price" else "price", call.arguments)


def main() -> None:
    """Write the files beside this one."""
    rng = random.Random(0)  # noqa: S311
    shown = questions(ITEMS, DEMONSTRATION_COUNT, rng)
    files: dict[str, list[object]] = {
        "train": [*questions(ITEMS, TRAIN_COUNT, rng)],
        "held_out": [*questions(HELD_OUT_ITEMS, HELD_OUT_COUNT, rng)],
        "demonstrations": [{"messages": demonstration(row, rng)} for row in shown],
        "gpu_train": [*questions(ITEMS, TRAIN_COUNT, rng, GPU_KINDS)],
        "gpu_held_out": [*questions(HELD_OUT_ITEMS, HELD_OUT_COUNT, rng, GPU_KINDS)],
    }
    for name, rows in files.items():
        text = "\n".join(map(json.dumps, rows)) + "\n"
        (HERE / f"{name}.jsonl").write_text(text, "utf-8")


if __name__ == "__main__":
    main()
