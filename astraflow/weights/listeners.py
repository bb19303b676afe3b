"""Listeners: who is told what a pull brings."""

from collections.abc import Sequence

from astraflow.weights.frame import Frame
from astraflow.weights.incoming import Incoming
from astraflow.weights.ports import Progress


def told(*listeners: Progress | None) -> Progress | None:
    """Return one listener for those that are there; None: nobody is."""
    there = [each for each in listeners if each is not None]
    return there[0] if len(there) == 1 else _All(there) if there else None


class _All:
    """Tells several, in order."""

    def __init__(self, listeners: Sequence[Progress]) -> None:
        self._listeners = listeners

    def begin(self, incoming: Incoming, frame: Frame) -> None:
        for each in self._listeners:
            each.begin(incoming, frame)

    def note(self) -> None:
        for each in self._listeners:
            each.note()
