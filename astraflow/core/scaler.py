"""The scaler: from advice to nodes that are started and drained, once each."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from astraflow.core.autoscale import ScaleAdvice
from astraflow.core.ids import MemberId


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePlan:
    """What to do now.

    Attributes:
        start: Names of nodes to start.
        drain: Members to let finish and leave.
    """

    start: tuple[str, ...] = ()
    drain: tuple[MemberId, ...] = ()


class Scaler:
    """Turns advice into plans; while nodes are on their way nothing is changed.

    Example:
        Advice of 4 nodes for 1: three are started. Advice of 4 for 2, while two of them are on
        their way: nothing is.
    """

    def __init__(self, *, prefix: str, start_timeout: timedelta) -> None:
        """Begin with no node on its way.

        Args:
            prefix: Of the names of nodes.
            start_timeout: A node that has not joined after so long is given up.
        """
        self._prefix = prefix
        self._start_timeout = start_timeout
        self._deadlines: dict[str, datetime] = {}
        self._count = 0

    @property
    def starting(self) -> tuple[str, ...]:
        """Names of the nodes on their way."""
        return tuple(self._deadlines)

    def forget(self, name: str) -> None:
        """Give up a node that could not be started."""
        self._deadlines.pop(name, None)

    def plan(self, advice: ScaleAdvice, now: datetime) -> ScalePlan:
        """Return what to do about advice."""
        joined = {member.name for member in advice.members}
        self._deadlines = {
            name: deadline
            for name, deadline in self._deadlines.items()
            if name not in joined and deadline > now
        }
        if self._deadlines:
            return ScalePlan()
        missing = max(0, advice.target_member_count - advice.member_count)
        names = tuple(self._next_name() for _ in range(missing))
        self._deadlines |= dict.fromkeys(names, now + self._start_timeout)
        return ScalePlan(start=names, drain=tuple(sorted(advice.retired)))

    def _next_name(self) -> str:
        self._count += 1
        return f"{self._prefix}-{self._count}"
