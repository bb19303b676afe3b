"""Rooms: the pool by free credit and pace, so that a placement looks only at who may get it."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Final, Generic, Protocol, TypeVar

from astraflow.core.ids import MemberId
from astraflow.core.speed import Speed


class IndexedMember(Protocol):
    """What is entered of a member."""

    @property
    def member_id(self) -> MemberId:
        """Who."""
        ...

    @property
    def number(self) -> int:
        """Rises by one per session that is opened."""
        ...

    @property
    def serves_any(self) -> bool:
        """Whether it holds a version of anything; before that it gets nothing."""
        ...

    @property
    def outstanding(self) -> int:
        """Samples that it holds."""
        ...

    @property
    def free_count(self) -> int:
        """Samples of training that it can take."""
        ...

    @property
    def eval_free_count(self) -> int:
        """Samples of evaluations that it can take."""
        ...

    @property
    def speed(self) -> Speed:
        """As measured."""
        ...


_NEW: Final = 0
_MEASURED: Final = 1
_SERVES_NOTHING: Final = 2

_T = TypeVar("_T", bound=IndexedMember)
# Free credit, and what is known of who has it.
_Bucket = tuple[int, int]
_Place = tuple[float, int, int]


class CapacityIndex(Generic[_T]):
    """Members by the samples that they could take now, each shelf of them by pace.

    A change of one member takes a search in its shelf, when somebody looks.

    Attributes:
        unit: Samples that are mostly placed at once. The pace of a member is the seconds per token
            that these would take with all that it holds; 0: not measured.
    """

    unit: int = 1

    def __init__(self, *, unit: int, is_eval: bool = False) -> None:
        """Begin with nobody.

        Args:
            unit: Samples that are mostly placed at once.
            is_eval: Whether credit is that for evaluations, else for training.
        """
        self.unit = unit
        self._is_eval = is_eval
        self._places: dict[MemberId, tuple[_Bucket, _Place]] = {}
        self._buckets: dict[_Bucket, list[_Place]] = {}
        self._members: dict[int, _T] = {}
        self._changed: dict[MemberId, _T] = {}

    def note(self, member: _T) -> None:
        """Enter a member, with its free credit and its pace when somebody looks."""
        self._changed[member.member_id] = member

    def _enter_changed(self) -> None:
        changed, self._changed = self._changed, {}
        for member in changed.values():
            free = member.eval_free_count if self._is_eval else member.free_count
            self._enter(member, free)

    def _enter(self, member: _T, free: int) -> None:
        out = member.outstanding
        shelf = free, _kind(member)
        place = member.speed.pace_s(outstanding=out, count=self.unit), out, member.number
        if self._places.get(member.member_id) != (shelf, place):
            self._take_out(member.member_id)
            self._places[member.member_id] = shelf, place
            self._members[member.number] = member
            insort(self._buckets.setdefault(shelf, []), place)

    def forget(self, member_id: MemberId) -> None:
        """Take a member out; one that is not here changes nothing."""
        self._changed.pop(member_id, None)
        self._take_out(member_id)

    def _take_out(self, member_id: MemberId) -> None:
        found = self._places.pop(member_id, None)
        if found is None:
            return
        shelf, place = found
        places = self._buckets[shelf]
        del places[bisect_left(places, place)]
        del self._members[place[2]]
        if not places:
            del self._buckets[shelf]

    def buckets(self, count: int) -> Iterator[tuple[int, Iterator[tuple[float, _T]]]]:
        """Yield who has credit for so many samples, at least one, and serves anything.

        First the credit, then those who have it, with their paces. Those with the same credit are
        together, those that were not measured yet by themselves. Of each shelf who has the least
        pace comes first, then who holds least, and who joined first.
        """
        self._enter_changed()
        for (free, kind), places in self._buckets.items():
            if free >= max(1, count) and kind != _SERVES_NOTHING:
                yield free, ((pace_s, self._members[number]) for pace_s, _, number in places)

    def with_capacity(self, count: int) -> Iterator[_T]:
        """Yield the same members one by one."""
        for _, shelf in self.buckets(count):
            for _, member in shelf:
                yield member

    def has_credit(self, count: int) -> bool:
        """Whether anybody has credit for so many samples, be it one that serves nothing yet."""
        self._enter_changed()
        return any(free >= max(1, count) for free, _ in self._buckets)


def _kind(member: IndexedMember) -> int:
    if not member.serves_any:
        return _SERVES_NOTHING
    return _MEASURED if member.speed.is_known else _NEW
