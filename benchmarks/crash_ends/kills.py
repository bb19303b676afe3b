"""What is killed, when: named places and random instants."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Final

from astraflow.storage.fault_points import FaultPoint

# How often a hub comes to a place before it dies there: within so many times.
_WITHIN: Final = {
    FaultPoint.RECOVERY_OPENED: 1,
    FaultPoint.RECOVERY_REPLAYED: 1,
    FaultPoint.RECOVERY_SERVING: 1,
    FaultPoint.JOURNAL_WAITING: 12,
    FaultPoint.JOURNAL_WRITTEN: 12,
    FaultPoint.JOURNAL_COMMITTED: 12,
    FaultPoint.CARRIED_OUT_HALF: 40,
    FaultPoint.MEMBER_SAFE: 2,
    FaultPoint.ROLLOUTS_SAFE: 4,
    FaultPoint.BATCH_HEADER_SENT: 2,
    FaultPoint.BATCH_SETTLED: 2,
    FaultPoint.VERSION_SAFE: 2,
}
# In the fork that makes a snapshot.
BESIDE: Final = (
    FaultPoint.SNAPSHOT_DUMPED,
    FaultPoint.SNAPSHOT_DRAFTED,
    FaultPoint.SNAPSHOT_PLACED,
)
COMPACTING: Final = (*BESIDE, FaultPoint.TRIM_STARTED, FaultPoint.TRIMMED_SOME)


class Victim(StrEnum):
    """Who is killed."""

    HUB = "hub"
    NODE = "node"
    TRAINER = "trainer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One kill -9.

    Attributes:
        victim: Whose.
        point: Where; None: after `delay_s`.
        count: How often it comes there first, this time included.
        delay_s: Seconds after it works again.
    """

    victim: Victim
    point: FaultPoint | None = None
    count: int = 1
    delay_s: float = 0.0

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.victim}: {self.point or 'any time'}"


def kills_of_hubs(count: int, *, every_s: float) -> Sequence[Kill]:
    """Return kills of one hub after the other, each when it has had so many seconds."""
    return [Kill(victim=Victim.HUB, delay_s=every_s)] * count


def draw_kills(
    chance: Random, *, points: int, hubs: int, nodes: int, trainers: int, compacting: bool
) -> Sequence[Kill]:
    """Return kills in a random order.

    Args:
        chance: Draws them.
        points: Of the hub, at places that take turns.
        hubs: Of the hub, at random instants.
        nodes: Of nodes, at random instants.
        trainers: Of trainers, at random instants.
        compacting: Whether each place around a snapshot comes once as well.
    """
    places = list(_WITHIN)
    chance.shuffle(places)
    chosen = [places[index % len(places)] for index in range(points)]
    kills = [
        Kill(victim=Victim.HUB, point=point, count=chance.randint(1, _WITHIN[point]))
        for point in chosen
    ]
    if compacting:
        kills += [Kill(victim=Victim.HUB, point=point) for point in COMPACTING]
    for victim, count in ((Victim.HUB, hubs), (Victim.NODE, nodes), (Victim.TRAINER, trainers)):
        kills += [Kill(victim=victim, delay_s=chance.uniform(0, 0.15)) for _ in range(count)]
    chance.shuffle(kills)
    return kills
