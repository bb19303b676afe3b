"""Rooms: the pool by free credit and speed, so that a placement looks only at who may get it."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import TYPE_CHECKING

from astraflow.core.ids import MemberId

if TYPE_CHECKING:
    from astraflow.core.live_members import RaasMember

_Shelf = tuple[int, bool]
_Place = tuple[float, int, int]


class Rooms:
    """Members by the samples that they could take now, each shelf of them by speed.

    A change of one member takes a search in its shelf.
    """

    def __init__(self) -> None:
        self._places: dict[MemberId, tuple[_Shelf, _Place]] = {}
        self._shelves: dict[_Shelf, list[_Place]] = {}
        self._members: dict[int, RaasMember] = {}

    def note(self, member: "RaasMember") -> None:
        """Enter a member with its free credit and its speed of now."""
        shelf = member.free_count, member.speed.is_known
        place = member.speed.token_s, member.outstanding, member.number
        if self._places.get(member.member_id) != (shelf, place):
            self.forget(member.member_id)
            self._places[member.member_id] = shelf, place
            self._members[member.number] = member
            insort(self._shelves.setdefault(shelf, []), place)

    def forget(self, member_id: MemberId) -> None:
        """Take a member out; one that is not here changes nothing."""
        found = self._places.pop(member_id, None)
        if found is None:
            return
        shelf, place = found
        places = self._shelves[shelf]
        del places[bisect_left(places, place)]
        del self._members[place[2]]
        if not places:
            del self._shelves[shelf]

    def shelves(self, count: int) -> Iterator[Iterator["RaasMember"]]:
        """Yield the members that have credit for so many samples, at least one.

        Those with the same credit are together, those that were not measured yet by themselves. Of
        each shelf who takes the fewest seconds per token comes first.
        """
        for (free, _), places in self._shelves.items():
            if free >= max(1, count):
                yield (self._members[number] for _, _, number in places)

    def with_room(self, count: int) -> Iterator["RaasMember"]:
        """Yield the same members one by one."""
        for shelf in self.shelves(count):
            yield from shelf
