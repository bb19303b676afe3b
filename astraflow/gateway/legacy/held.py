"""Versions of a policy as the published lane has them: flat, each in memory of its own."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import numpy as np

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.updates import WeightUpdate
from astraflow.core.versions import VersionInfo
from astraflow.gateway.legacy.frames import encode_delta
from astraflow.gateway.legacy.plan import BufferPlan
from astraflow.rpc.tls import Tls
from astraflow.weights.puller import WeightPuller


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldVersion:
    """One version; nobody writes to it, so a transfer is never torn.

    Attributes:
        version: Of the run.
        plan: Where its tensors are.
        flat: u8[nbytes].
        delta: u8[...], from the version before; None: there is none.
        changed_count: Elements in the delta.
    """

    version: int
    plan: BufferPlan
    flat: np.ndarray
    delta: np.ndarray | None = None
    changed_count: int = 0


class WeightDesk:
    """Pulls versions as any member does, and lays them out for existing receivers.

    Attributes:
        newest: None: nothing was pulled yet.
    """

    def __init__(self, policy_id: PolicyId, *, tls: Tls | None = None) -> None:
        """Start with nothing.

        Args:
            policy_id: Whose weights.
            tls: Of the sources; None: plain text.
        """
        self.newest: HeldVersion | None = None
        self._policy_id = policy_id
        self._puller = WeightPuller(policy_id, tls=tls)
        self._one_at_a_time = asyncio.Lock()

    async def get(
        self,
        target: VersionInfo,
        listed: Callable[[], Awaitable[Iterable[VersionInfo]]],
        transfer_token: bytes,
    ) -> HeldVersion:
        """Return a version, or a newer one that is here already.

        Args:
            target: Which.
            listed: Asks the run for its versions.
            transfer_token: Of the run.

        Raises:
            PullFailed: It cannot be had.
        """
        async with self._one_at_a_time:
            if self.newest is not None and self.newest.version >= target.version:
                return self.newest
            known = {info.version: info for info in await listed()}
            pulled = await self._puller.pull(target, known, transfer_token, listed=listed)
            self.newest = await asyncio.to_thread(self._laid_out, pulled.update)
            return self.newest

    async def close(self) -> None:
        """Close connections."""
        await self._puller.close()

    def _laid_out(self, update: WeightUpdate) -> HeldVersion:
        base = self.newest
        if update.base_version is None or base is None or base.version != update.base_version:
            update = self._puller.full_update()
            specs = [each.spec for each in update.tensors]
            plan = BufferPlan.of([(spec.name, spec.dtype, spec.shape) for spec in specs])
            flat = np.zeros(plan.nbytes, np.uint8)
        else:
            plan, flat = base.plan, base.flat.copy()
        plan.write(flat, update.tensors)
        return _held(update.version, plan, flat, base)


def _held(
    version: int, plan: BufferPlan, flat: np.ndarray, base: HeldVersion | None
) -> HeldVersion:
    """Return a version with the delta from its base, where one can be."""
    is_next = base is not None and base.version == version - 1 and base.plan == plan
    if base is None or not is_next or not plan.has_deltas:
        return HeldVersion(version=version, plan=plan, flat=flat)
    delta = encode_delta(base.flat.view(np.uint16), flat.view(np.uint16))
    if len(delta) >= len(flat):
        return HeldVersion(version=version, plan=plan, flat=flat)
    changed = int(delta[:8].view(np.uint64)[0])
    return HeldVersion(version=version, plan=plan, flat=flat, delta=delta, changed_count=changed)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Offer:
    """A version under the number that one receiver knows it by.

    Attributes:
        held: The version.
        number: What the receiver is told; it counts from 1.
        base: The number of what `held.delta` changes; None: the receiver does not hold that.
    """

    held: HeldVersion
    number: int
    base: int | None = None

    @property
    def delta(self) -> np.ndarray | None:
        """What the receiver can apply to what it holds, u8[...]."""
        return None if self.base is None else self.held.delta


class Sender:
    """What one receiver is served: the version that it was told of, until it is told of another.

    Attributes:
        policy_id: Whose weights.
        offer: None: nothing yet.
        pushed: The number of the last version of which the receiver acknowledged every byte; None:
            of none.
    """

    def __init__(self, policy_id: PolicyId) -> None:
        """Serve nothing yet.

        Args:
            policy_id: Whose weights.
        """
        self.policy_id = policy_id
        self.offer: Offer | None = None
        self.pushed: int | None = None

    def require(self) -> Offer:
        """Return what is served.

        Raises:
            AstraflowError: NOT_READY before the first version.
        """
        if self.offer is None:
            raise AstraflowError(Reason.NOT_READY, "no version has come yet; ask again")
        return self.offer
