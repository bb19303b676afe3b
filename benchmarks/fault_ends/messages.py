"""Message faults: what passes between liars and a puller is damaged, version after version."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Final

from astraflow.core.versions import VersionInfo
from fault_ends.damage import CLASSES, DAMAGES, Damage
from fault_ends.lane import HONEST, FaultyLane
from fault_ends.trial import Counts, Receiver, count
from fault_ends.world import World, sources

LIARS: Final = tuple(f"liar:{number}" for number in range(6))

# Of versions; most bring several injections each.
_MOST_BARREN: Final = 200

# How receivers pull: from one source after the other, from several at once, as a relay.
_STYLES: Final[tuple[dict[str, bool], ...]] = (
    {},
    {},
    {},
    {},
    {"shares": True},
    {"shares": True},
    {"shares": True, "relays": True},
    {"relays": True},
)


class MessageFaults:
    """Injects until every class has its quota.

    Attributes:
        counts: By class.
    """

    def __init__(
        self, *, quota: int, seed: int, scale: int, classes: Sequence[str] = CLASSES
    ) -> None:
        """Prepare a training and its receivers.

        Args:
            quota: Injections per class.
            seed: Decides everything.
            scale: Of the layout.
            classes: Of faults.
        """
        self.counts = {name: Counts() for name in classes}
        self._quota = quota
        self._rng = Random(seed)
        self._world = World(seed=seed, scale=scale)
        self._stranger = World(seed=seed + 1_000_003, scale=scale)
        self._lane = FaultyLane(self._world, self._stranger, self._rng)
        self._receivers = [self._receiver(number) for number in range(len(_STYLES))]

    async def run(self) -> dict[str, Counts]:
        """Inject, and return the counts.

        Raises:
            RuntimeError: What is injected does not reach the pullers any more.
        """
        barren_count = 0
        while left := self._left():
            if barren_count == _MOST_BARREN:
                raise RuntimeError(f"{barren_count} versions in a row met none of {left}")
            before = self._injected_count(left)
            await self._publish()
            barren_count = 0 if self._injected_count(left) > before else barren_count + 1
        return self.counts

    def _left(self) -> list[str]:
        """Return the classes that have not their quota yet."""
        return [name for name, each in self.counts.items() if each.injected < self._quota]

    def _injected_count(self, names: Sequence[str]) -> int:
        return sum(self.counts[name].injected for name in names)

    async def _publish(self) -> None:
        """Let all receivers pull one more version, but for those that lag."""
        info = self._world.publish()
        self._stranger.publish()
        for number in range(len(self._receivers)):
            # Some lag, and go on by a chain of patches.
            if self._receivers[number].puller.version is None or self._rng.random() > 0.15:
                await self._trial(number, info)

    async def _trial(self, number: int, info: VersionInfo) -> None:
        """Let up to six liars and an honest source serve one version."""
        receiver, lane = self._receivers[number], self._lane
        before = receiver.puller.version
        kinds = {} if before is None else self._kinds()
        lane.damages = {liar: damage for liar, (_, damage) in kinds.items()}
        lane.hits = set()
        early: list[str] = []

        def look() -> None:
            if not receiver.is_held(before):
                early.append(f"what is held changed before all of version {info.version} was here")

        lane.before_ask = look
        outcome = await receiver.pull(self._served_by([*kinds, HONEST], info))
        if early:
            outcome = replace(outcome, corruption=early[0])
        for liar in lane.hits & kinds.keys():
            name, damage = kinds[liar]
            count(self.counts[name], damage.__name__, outcome, liar)
        if outcome.corruption:
            self._receivers[number] = self._receiver(number)

    def _kinds(self) -> dict[str, tuple[str, Damage]]:
        """Return what liars do: class and damage by endpoint."""
        left = self._left()
        liars = LIARS[: self._rng.randrange(1, len(LIARS) + 1)]
        names = [self._rng.choice(left or list(self.counts)) for _ in liars]
        return {
            liar: (name, self._rng.choice(DAMAGES[name]))
            for liar, name in zip(liars, names, strict=True)
        }

    def _served_by(self, endpoints: list[str], info: VersionInfo) -> VersionInfo:
        # Who draws from several asks the others while the first one sends.
        if self._rng.random() < 0.2:
            self._rng.shuffle(endpoints)
        return replace(info, sources=sources(tuple(endpoints)))

    def _receiver(self, number: int) -> Receiver:
        return Receiver(self._world, self._lane, **_STYLES[number])
