"""Writes demonstrations.jsonl, train.jsonl and held_out.jsonl.

    python recipes/alfworld/make_data.py

A task is a kind of thing and where it belongs. Whether it is held out is decided by a digest of it
alone, so no held-out task is seen in a demonstration or in training; the rooms of all are drawn in
the same way.
"""

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from household import RECEPTACLES, THINGS, Household, kind_of

HERE = Path(__file__).parent
ROOM = {"receptacles": 3, "things": 1}
ROOMS_PER_TASK, HELD_OUT_ROOMS = 16, 10
DEMONSTRATION_COUNT, MAX_TURNS = 600, 8
# Of all tasks.
HELD_OUT_SHARE = 0.2
# Of the demonstrations, in which every second command leads to somewhere at random.
DISTRACTED_SHARE = 0.6


def is_held_out(task: Mapping[str, str]) -> bool:
    digest = hashlib.sha256(f"{task['thing']} {task['target']}".encode()).digest()
    return int.from_bytes(digest[:4]) < HELD_OUT_SHARE * 2**32


def tasks(*, held_out: bool) -> Sequence[Mapping[str, str]]:
    every = ({"thing": thing, "target": target} for thing in THINGS for target in RECEPTACLES)
    return [task for task in every if is_held_out(task) == held_out]


def plan(world: Household, rng: random.Random) -> Iterator[str]:
    """Yield the next command of somebody who knows how, and may be distracted.

    It looks into one receptacle after the other for the thing, then brings it where it belongs.
    """
    room = world.room
    left = list(room.contents)
    stray_share = 0.5 if rng.random() < DISTRACTED_SHARE else 0.0
    while True:
        at = room.place
        wanted = [each for each in room.contents.get(at, ()) if kind_of(each) == room.thing]
        if rng.random() < stray_share:
            yield rng.choice([each for each in room.commands() if each.startswith("go")])
        elif at and room.is_shut(at):
            yield f"open {at}"
        elif wanted and not room.held and kind_of(at) != room.target:
            yield f"take {wanted[0]} from {at}"
        elif room.held and kind_of(at) == room.target:
            yield f"move {room.held} to {at}"
        elif room.held:
            yield f"go to {room.target} 1"
        else:
            left = [name for name in left if name != at] or [n for n in room.contents if n != at]
            yield f"go to {left[0]}"


def demonstration(task: Mapping[str, str], seed: int) -> Mapping[str, object]:
    world, rng = Household(**ROOM), random.Random(seed)  # noqa: S311 - no secret
    messages = [{"role": "user", "content": world.reset(task, seed)}]
    commands = plan(world, rng)
    for _ in range(MAX_TURNS):
        command = next(commands)
        messages.append({"role": "assistant", "content": command})
        step = world.step(command)
        if step.is_done:
            break
        messages.append({"role": "user", "content": step.observation})
    else:
        messages.pop()
    return {"messages": messages}


def write(name: str, rows: Iterator[Mapping[str, object]]) -> None:
    lines = [json.dumps(row, separators=(",", ":")) for row in rows]
    (HERE / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    known, unknown = tasks(held_out=False), tasks(held_out=True)
    shown = [known[n % len(known)] for n in range(DEMONSTRATION_COUNT)]
    write("demonstrations.jsonl", (demonstration(task, 10**6 + n) for n, task in enumerate(shown)))
    for name, some, count, first in (
        ("train.jsonl", known, ROOMS_PER_TASK, 0),
        ("held_out.jsonl", unknown, HELD_OUT_ROOMS, 10**5),
    ):
        rooms = [task for task in some for _ in range(count)]
        write(name, ({**task, "seed": first + n} for n, task in enumerate(rooms)))


if __name__ == "__main__":
    main()
