"""Trials: one injection, one pull, one judgement against the true bytes."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from astraflow.core.tensors import WeightUpdate
from astraflow.core.versions import VersionInfo
from astraflow.weights.fetch.lanes import ChunkLane
from astraflow.weights.fetch.puller import PullFailed, WeightPuller
from astraflow.weights.fetch.sources import FetchSettings
from astraflow.weights.heartbeat import StallTimeouts
from astraflow.weights.serve.relay import WeightRelay
from fault_ends.world import POLICY, TOKEN, World


@dataclass(slots=True, kw_only=True)
class Counts:
    """What came of the injections of one class.

    Attributes:
        injected: That reached the puller.
        detected: Of which a report tells.
        recovered: The new version is live, by patches.
        recovered_whole: The new version is live, by a full copy.
        refused: The old version is live, and the pull failed with a typed error.
        untyped: The pull failed with any other error.
        silent: What is live is neither the old version nor the new one, or not the one that it
            is said to be.
        kinds: Injections by kind.
        reasons: Of what was detected.
        faults: What went wrong, in words; the first ones.
    """

    injected: int = 0
    detected: int = 0
    recovered: int = 0
    recovered_whole: int = 0
    refused: int = 0
    untyped: int = 0
    silent: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def add(self, other: "Counts") -> None:
        """Count what another process counted."""
        for name in NUMBERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.kinds.update(other.kinds)
        self.reasons.update(other.reasons)
        self.faults.extend(other.faults)

    @property
    def is_safe(self) -> bool:
        """Whether nothing was corrupted, and all failures were typed ones."""
        return not self.silent + self.untyped

    @property
    def is_good(self) -> bool:
        """Whether it is safe, and all but 1 in 1000 were recovered from without a full copy."""
        return self.is_safe and 1000 * self.recovered >= 999 * self.injected

    def row(self) -> dict[str, object]:
        """Return it as JSON."""
        return {name: getattr(self, name) for name in NUMBERS} | {
            "recovered_share": round(self.recovered / max(1, self.injected), 6),
            "kinds": dict(self.kinds),
            "reasons": dict(self.reasons),
            "faults": self.faults[:20],
        }


NUMBERS = ("injected", "detected", "recovered", "recovered_whole", "refused", "untyped", "silent")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one pull.

    Attributes:
        update: What was pulled; None: it failed.
        nbytes: Payload that it took.
        error: Why it failed.
        faults: Reasons of the failures that the reports tell of, by address of the source.
        corruption: How what is live differs from what it should be; empty: not at all.
    """

    update: WeightUpdate | None
    nbytes: int
    error: Exception | None
    faults: Mapping[str, str]
    corruption: str


class Receiver:
    """A puller, and an engine that applies what it gives: u8[nbytes] that are live."""

    def __init__(
        self,
        world: World,
        lane: ChunkLane | None = None,
        *,
        shares: bool = False,
        relays: bool = False,
        relay_stall_s: float = 5.0,
    ) -> None:
        """Start with nothing.

        Args:
            world: Whose versions are pulled.
            lane: None: the real ones.
            shares: Draw from several sources at once, however little there is.
            relays: Pass on what is pulled.
            relay_stall_s: Patience with relays.
        """
        settings = FetchSettings(
            relay_timeouts=StallTimeouts(
                silent_s=relay_stall_s, first_s=relay_stall_s, idle_s=relay_stall_s
            ),
            avoided_s=0.0,
        )
        if shares:
            settings = replace(settings, shared_nbytes=1)
        relay = WeightRelay() if relays else None
        self.puller = WeightPuller(
            POLICY, lane=lane, relay=relay, settings=settings, stall_timeout_s=5.0
        )
        self._world = world
        self._live = np.zeros(world.layout.nbytes, np.uint8)
        self._live_version: int | None = None

    async def pull(
        self, info: VersionInfo, known: Mapping[int, VersionInfo] | None = None
    ) -> Outcome:
        """Pull a version, apply it, and compare all bytes with the true ones."""
        before = self.puller.version
        update: WeightUpdate | None = None
        nbytes = 0
        error: Exception | None = None
        try:
            pulled = await self.puller.pull(info, known or self._world.infos, TOKEN)
            update, nbytes, reports = pulled.update, pulled.nbytes, pulled.reports
            self._apply(update)
        except PullFailed as failed:
            error, reports = failed, failed.reports
        except Exception as other:  # noqa: BLE001 - whatever it is, it is counted and told
            error, reports = other, ()
        faults = {each.address: each.failure.reason.value for each in reports if each.failure}
        # What is held is written beside the swap.
        await self.puller.flush()
        expected = before if update is None else info.version
        corruption = self._corruption(expected)
        return Outcome(
            update=update, nbytes=nbytes, error=error, faults=faults, corruption=corruption
        )

    def is_held(self, version: int | None) -> bool:
        """Whether a version is held, in every byte."""
        held = self.puller._holding.state  # noqa: SLF001 - what is held, not what is told of it
        if held is None or held.version != version:
            return held is None and version is None
        return np.array_equal(held.flat, self._world.truths[version])

    def _apply(self, update: WeightUpdate) -> None:
        if update.base_version not in (None, self._live_version):
            # An update got lost in a call that was cancelled.
            update = self.puller.full_update()
        for each in update.tensors:
            bits = self._world.layout.view(self._live, each.spec.name).reshape(-1)
            bits[slice(None) if each.indices is None else each.indices] = each.values
        self._live_version = update.version

    def _corruption(self, expected: int | None) -> str:
        """Say how what is live and what is held differ from the true bytes of a version."""
        if self._live_version != expected:
            return f"live is {self._live_version}, not {expected}"
        if not self.is_held(expected):
            return f"what is held ({self.puller.version}) is not version {expected}"
        if expected is None or np.array_equal(self._live, self._world.truths[expected]):
            return ""
        return f"what is live is not version {expected}"


def count(counts: Counts, kind: str, outcome: Outcome, source: str) -> None:
    """Count an injection by what came of it: what it was, and who did it."""
    counts.injected += 1
    counts.kinds[kind] += 1
    if source in outcome.faults:
        counts.detected += 1
        counts.reasons[outcome.faults[source]] += 1
    if outcome.corruption:
        counts.silent += 1
        counts.faults.append(f"{kind}: {outcome.corruption}; {outcome.error!r}")
    elif outcome.update is not None:
        is_whole = outcome.update.base_version is None
        counts.recovered_whole += is_whole
        counts.recovered += not is_whole
    elif isinstance(outcome.error, PullFailed):
        counts.refused += 1
        counts.faults.append(f"{kind}: {outcome.error}")
    else:
        counts.untyped += 1
        counts.faults.append(f"{kind}: {outcome.error!r}")
