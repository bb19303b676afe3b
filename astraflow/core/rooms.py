"""Rooms: the pool by free credit, so that a placement looks only at those who have room."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from astraflow.core.ids import MemberId

if TYPE_CHECKING:
    from astraflow.core.live_members import RaasMember


class Rooms:
    """Members by the samples that they could take now.

    A change of one member costs the same in a pool of any size.
    """

    def __init__(self) -> None:
        self._free: dict[MemberId, int] = {}
        self._by_free: dict[int, dict[MemberId, RaasMember]] = {}

    def note(self, member: "RaasMember") -> None:
        """Enter a member with the credit that it has free now."""
        if self._free.get(member.member_id) != member.free_count:
            self.forget(member.member_id)
            self._free[member.member_id] = member.free_count
            self._by_free.setdefault(member.free_count, {})[member.member_id] = member

    def forget(self, member_id: MemberId) -> None:
        """Take a member out; one that is not here changes nothing."""
        free = self._free.pop(member_id, None)
        if free is None:
            return
        del self._by_free[free][member_id]
        if not self._by_free[free]:
            del self._by_free[free]

    def with_room(self, count: int) -> Iterator["RaasMember"]:
        """Yield the members that have credit for so many samples, at least one."""
        for free, members in self._by_free.items():
            if free >= max(1, count):
                yield from members.values()
