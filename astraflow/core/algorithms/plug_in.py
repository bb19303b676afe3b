"""What every data algorithm is: a dataclass, whose options are its fields."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any


class PlugIn:
    """Base of all data algorithms.

    An algorithm is a dataclass. Its fields are the options that a recipe sets; fields with
    `init=False` are its state, which snapshots keep: plain values only (numbers, text, None,
    lists, tuples, dicts, sets). It decides by what it is told alone, so that a replay of the
    journal comes to the same: no clock, no files, no chance but that of the dice it is given.
    """

    __slots__ = ()

    def metrics(self) -> Mapping[str, float]:
        """Return numbers for the log, by short names."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlugInSpec:
    """An algorithm as a recipe names it.

    Attributes:
        name: Built in, an entry point of an installed package, or module:Class.
        options: Its fields.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(slots=True, kw_only=True)
class Dice:
    """Chance that can be repeated: the k-th roll depends on the seed and k alone.

    Attributes:
        seed: Of the run.
        salt: Tells the dice of one run apart.
        count: Rolls so far.
    """

    seed: int
    salt: str
    count: int = 0

    def roll(self) -> float:
        """Return a number in [0, 1)."""
        self.count += 1
        digest = blake2b(f"{self.seed}/{self.salt}/{self.count}".encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "big") >> 11) / (1 << 53)
