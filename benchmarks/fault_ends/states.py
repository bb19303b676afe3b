"""State faults: a rotten base, a manifest that lies, a cold join among liars, a call cut off.

Here a full copy may be right, or no version at all; what is live is true all the same.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Any, Final

import numpy as np

from astraflow.core.versions import PatchInfo, VersionInfo
from fault_ends.damage import CLASSES, DAMAGES
from fault_ends.lane import HONEST, FaultyLane
from fault_ends.trial import Counts, Outcome, Receiver, count
from fault_ends.world import World, sources

LIAR: Final = "liar:1"


class StateFaults:
    """Injects what does not travel with messages.

    Attributes:
        counts: By class.
    """

    def __init__(self, *, quota: int, seed: int, scale: int) -> None:
        """Prepare a training; `quota` is per class, `seed` decides everything."""
        self._trials = {
            "cold_join": self._cold_join,
            "rotten_base": self._rotten_base,
            "lying_manifest": self._lying_manifest,
            "cancelled": self._cancelled,
        }
        self.counts = {name: Counts() for name in self._trials}
        self._quota = quota
        self._rng = Random(seed)
        self._world = World(seed=seed, scale=scale, endpoints=(LIAR, HONEST))
        stranger = World(seed=seed + 1_000_003, scale=scale)
        self._lane = FaultyLane(self._world, stranger, self._rng)
        self._stranger = stranger

    async def run(self) -> dict[str, Counts]:
        """Inject, and return the counts."""
        info = self._publish()
        receivers = {name: self._receiver() for name in self._trials}
        for receiver in receivers.values():
            await receiver.pull(info)
        for _ in range(self._quota):
            info = self._publish()
            for name, trial in self._trials.items():
                kind, outcome = await trial(receivers[name], info)
                count(self.counts[name], kind, outcome, LIAR)
                self._lane.damages, self._lane.spoils_layout = {}, False
                if outcome.corruption:
                    receivers[name] = self._receiver()
        return self.counts

    def _publish(self) -> VersionInfo:
        self._stranger.publish()
        return self._world.publish()

    def _receiver(self) -> Receiver:
        return Receiver(self._world, self._lane)

    async def _cold_join(self, _: Receiver, info: VersionInfo) -> tuple[str, Outcome]:
        """Join with a liar as the best source, of layouts too."""
        damage = self._rng.choice(DAMAGES[self._rng.choice(CLASSES)])
        self._lane.damages = {LIAR: damage}
        self._lane.spoils_layout = self._rng.random() < 0.5
        outcome = await self._receiver().pull(info)
        return ("layout" if self._lane.spoils_layout else damage.__name__), outcome

    async def _rotten_base(self, receiver: Receiver, info: VersionInfo) -> tuple[str, Outcome]:
        """Flip a bit of what is held where the version changes it."""
        held = receiver.puller._holding.state  # noqa: SLF001 - memory that rots asks nobody
        assert held is not None
        before = self._world.truths[held.version]
        changed = np.flatnonzero(before != self._world.truths[info.version])
        at = int(self._rng.choice(changed.tolist() or [0]))
        held.flat[at] ^= 1 << self._rng.randrange(8)
        return "flip_held", await receiver.pull(info)

    async def _lying_manifest(self, receiver: Receiver, info: VersionInfo) -> tuple[str, Outcome]:
        """Tell another story of a version than the publisher did."""
        lie = self._rng.choice(_LIES)
        told = lie(self._rng, info)
        outcome = await receiver.pull(told, {**self._world.infos, told.version: told})
        after = await receiver.pull(info)
        if after.corruption or after.update is None:
            why = after.corruption or f"the true version is refused after a lie: {after.error!r}"
            outcome = replace(outcome, corruption=outcome.corruption or why)
        return lie.__name__, outcome

    async def _cancelled(self, receiver: Receiver, info: VersionInfo) -> tuple[str, Outcome]:
        """Cancel the call somewhere, then pull again."""
        before = receiver.puller.version
        task = asyncio.create_task(receiver.pull(info))
        for _ in range(self._rng.randrange(120)):
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await receiver.puller.flush()
        is_whole = receiver.is_held(before) or receiver.is_held(info.version)
        outcome = await receiver.pull(info)
        if not is_whole:
            outcome = replace(outcome, corruption="what is held is torn after a cancelled call")
        return "cancel", _as_patch(outcome, receiver)


def _as_patch(outcome: Outcome, receiver: Receiver) -> Outcome:
    """A version that is held already comes whole, and costs nothing."""
    if outcome.update is None or outcome.nbytes:
        return outcome
    return replace(outcome, update=replace(outcome.update, base_version=receiver.puller.version))


Lie = Callable[[Random, VersionInfo], VersionInfo]


def content(rng: Random, info: VersionInfo) -> VersionInfo:
    """Tell another state digest."""
    return replace(info, content_digest=rng.randbytes(16))


def layout(rng: Random, info: VersionInfo) -> VersionInfo:
    """Tell another layout."""
    return replace(info, layout_digest=rng.randbytes(32))


def roots(rng: Random, info: VersionInfo) -> VersionInfo:
    """Tell other roots."""
    return _with(info, lambda patch: {"root_digest": rng.randbytes(len(patch.root_digest))})


def counts(rng: Random, info: VersionInfo) -> VersionInfo:
    """Tell other numbers of chunks."""
    return _with(info, lambda patch: {"chunk_count": patch.chunk_count + rng.choice([-1, 1, 1000])})


def sizes(rng: Random, info: VersionInfo) -> VersionInfo:
    """Tell other sizes, so that the longest way seems to be the shortest."""
    return _with(info, lambda _: {"payload_nbytes": rng.choice([0, 1, 1 << 40])})


def bases(rng: Random, info: VersionInfo) -> VersionInfo:
    """Tell that the patches start from somewhere else."""
    del rng
    return _with(
        info,
        lambda patch: {
            "base_version": None if patch.base_version is not None else info.version - 1
        },
    )


def future(rng: Random, info: VersionInfo) -> VersionInfo:
    """Tell of a version that does not exist yet."""
    version = info.version + rng.randrange(1, 1 << 40)
    return replace(_with(info, lambda _: {"version": version}), version=version)


def nobody(rng: Random, info: VersionInfo) -> VersionInfo:
    """Tell of sources that are not there."""
    del rng
    return replace(info, sources=sources(()))


_LIES: Final[tuple[Lie, ...]] = (content, layout, roots, counts, sizes, bases, future, nobody)


def _with(info: VersionInfo, change: Callable[[PatchInfo], Mapping[str, Any]]) -> VersionInfo:
    patches = tuple(replace(patch, **change(patch)) for patch in info.patches)
    return replace(info, patches=patches)
