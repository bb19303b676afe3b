"""ALFWorld's pick-and-place tasks without its engine: the same commands, the same words.

A room has receptacles, some of which are closed, and things in them. The episode is won when a
thing of the wanted kind is where it is wanted; that is the whole reward. What a command does and
what it says is that of ALFWorld 0.4.2, `tests/recipes/test_alfworld.py` compares them.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from astraflow.workflows.environments.protocol import Step

RECEPTACLES = ("cabinet", "countertop", "desk", "drawer", "fridge", "shelf")
OPENABLE = frozenset({"cabinet", "drawer", "fridge"})
THINGS = ("apple", "book", "bowl", "egg", "knife", "mug", "pen", "vase")
_IN_THE_MIDDLE = "You are in the middle of a room. Looking quickly around you, you see"


@dataclass
class Room:
    """A game that has begun.

    Attributes:
        contents: What is in each receptacle, by their names, such as "fridge 1".
        thing: Kind that is wanted, such as "apple".
        target: Kind of receptacle that it is wanted in.
        opened: Receptacles that are open.
        place: Where the player stands; empty: in the middle of the room.
        held: What the player carries; empty: nothing.
    """

    contents: dict[str, list[str]]
    thing: str
    target: str
    opened: set[str] = field(default_factory=set)
    place: str = ""
    held: str = ""

    @property
    def is_won(self) -> bool:
        return any(
            kind_of(each) == self.thing
            for name, things in self.contents.items()
            if kind_of(name) == self.target
            for each in things
        )

    def is_shut(self, name: str) -> bool:
        return kind_of(name) in OPENABLE and name not in self.opened

    def commands(self) -> Sequence[str]:
        """What can be done here, in alphabetical order."""
        can = [f"go to {name}" for name in self.contents if name != self.place]
        can += ["inventory", "look"]
        if self.held:
            can.append(f"examine {self.held}")
        place = self.place
        if place:
            can.append(f"examine {place}")
            if kind_of(place) in OPENABLE:
                can.append(f"{'open' if self.is_shut(place) else 'close'} {place}")
            if not self.is_shut(place):
                can += [
                    f"take {each} from {place}" for each in self.contents[place] if not self.held
                ]
                can += [f"move {self.held} to {place}"] * bool(self.held)
        return sorted(can)


def kind_of(name: str) -> str:
    """Return "fridge" of "fridge 1"."""
    return name.rpartition(" ")[0]


def draw(task: Mapping[str, Any], seed: int, *, receptacles: int, things: int) -> Room:
    """Return a room in which the wanted thing is somewhere else than it is wanted.

    Args:
        task: May have the kinds `thing` and `target`; else they are drawn, too.
        seed: Of all that is drawn.
        receptacles: In the room.
        things: In the room, at most as many as there are kinds.
    """
    rng = random.Random(seed)  # noqa: S311 - games are no secrets
    thing = task.get("thing") or rng.choice(THINGS)
    target = task.get("target") or rng.choice(RECEPTACLES)
    others = rng.sample([kind for kind in RECEPTACLES if kind != target], receptacles - 1)
    names = [f"{kind} 1" for kind in sorted([target, *others])]
    contents: dict[str, list[str]] = {name: [] for name in names}
    contents[f"{rng.choice(others)} 1"].append(f"{thing} 1")
    for kind in rng.sample([kind for kind in THINGS if kind != thing], things - 1):
        contents[rng.choice(names)].append(f"{kind} 1")
    return Room({name: sorted(inside) for name, inside in contents.items()}, thing, target)


class Household:
    """One room, one task; the reward is 1 when it is done."""

    def __init__(self, receptacles: int = 5, things: int = 4, commands: bool = False) -> None:
        """Set the size of the rooms.

        Args:
            receptacles: In a room, 2 to 6.
            things: In a room, 1 to 8.
            commands: Tell in each observation what can be done, as the adapter `alfworld` does.
        """
        if not 2 <= receptacles <= len(RECEPTACLES) or not 1 <= things <= len(THINGS):
            raise ValueError("a room has 2 to 6 receptacles and 1 to 8 things")
        self._size = {"receptacles": receptacles, "things": things}
        self._shows_commands = commands
        self.room = draw({}, 0, **self._size)

    def reset(self, task: Mapping[str, Any], seed: int) -> str:
        """Enter a room; a row may have the kinds `thing` and `target`."""
        for key, kinds in (("thing", THINGS), ("target", RECEPTACLES)):
            if key in task and task[key] not in kinds:
                raise ValueError(f"{key}: '{task[key]}' is none of {', '.join(kinds)}")
        self.room = draw(task, seed, **self._size)
        seen = listed(self.room.contents)
        return self._told(
            f"{_IN_THE_MIDDLE} {seen}.\n"
            f"Your task is to: put a {self.room.thing} in {self.room.target}."
        )

    def step(self, action: str) -> Step:
        """Type a command; one that cannot be done does nothing."""
        room = self.room
        command = " ".join(action.lower().split())
        said = self._done(command) if command in room.commands() else "Nothing happens."
        won = float(room.is_won)
        return Step(self._told(said), won, is_done=room.is_won, metrics={"won": won})

    def close(self) -> None:
        """Nothing to let go of."""

    def _done(self, command: str) -> str:  # noqa: PLR0911 - one per command
        room = self.room
        match command.split():
            case ["look"] if room.place:
                return f"You are facing the {room.place}. Next to it, you see nothing."
            case ["look"]:
                # So says ALFWorld, though it has just named the receptacles.
                return f"{_IN_THE_MIDDLE} nothing."
            case ["inventory"]:
                held = f": a {room.held}" if room.held else ""
                return f"You are carrying{held}." if held else "You are not carrying anything."
            case ["go", "to", *_]:
                room.place = command.removeprefix("go to ")
                return f"You arrive at {room.place}. {self._seen()}"
            case ["open", *_]:
                room.opened.add(room.place)
                return f"You open the {room.place}. {self._seen()}"
            case ["close", *_]:
                room.opened.discard(room.place)
                return f"You close the {room.place}."
            case ["take", *_]:
                room.held = command.removeprefix("take ").partition(" from ")[0]
                room.contents[room.place].remove(room.held)
                return f"You pick up the {room.held} from the {room.place}."
            case ["move", *_]:
                held, room.held = room.held, ""
                room.contents[room.place] = sorted([*room.contents[room.place], held])
                return f"You move the {held} to the {room.place}."
            case _ if command == f"examine {room.place}":
                return self._seen()
            case _:
                return f"There's nothing special about {room.held}."

    def _seen(self) -> str:
        """What is in the receptacle before the player."""
        room = self.room
        if room.is_shut(room.place):
            return f"The {room.place} is closed."
        inside = listed(room.contents[room.place])
        if kind_of(room.place) in OPENABLE:
            return f"The {room.place} is open. In it, you see {inside}."
        return f"On the {room.place}, you see {inside}."

    def _told(self, said: str) -> str:
        if not self._shows_commands:
            return said
        return f"{said}\nYou can: {', '.join(self.room.commands())}"


def listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    """Return "a mug 1, and a pen 1" of both."""
    words = [f"a {name}" for name in names]
    if len(words) > 1:
        words[-1] = f"and {words[-1]}"
    return ", ".join(words) or "nothing"
