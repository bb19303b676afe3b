"""A copy of a trainer's weights: fetched from its sender, full or as a delta."""

import asyncio

import numpy as np
import structlog

from astraflow.core.errors import AstraflowError, Reason
from astraflow.gateway.legacy.frames import apply_delta
from astraflow.gateway.legacy.plan import BufferPlan
from astraflow.gateway.legacy.sender_client import SenderClient

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class SenderCopy:
    """Holds the bytes of one version, and moves on to what the sender says it has.

    A version counts as held when the sender named it before, in its answer and after: a label is
    the version of the bytes.

    Attributes:
        plan: Of the sender's buffer.
        is_full: Whether the last transfer was a full one.
        nbytes: Of the last transfer.
    """

    def __init__(self, sender: SenderClient, plan: BufferPlan) -> None:
        """Hold nothing.

        Args:
            sender: Has them; closed with the copy.
            plan: Of its buffer.
        """
        self.plan = plan
        self.is_full = True
        self.nbytes = 0
        self._sender = sender
        self._flat = np.zeros(plan.nbytes, np.uint8)
        # The sender's number of what is in `_flat`; None: nothing sound.
        self._held: int | None = None

    @property
    def endpoint(self) -> str:
        """host:port of the sender."""
        return self._sender.endpoint

    async def close(self) -> None:
        """Let go of the sender."""
        await self._sender.__aexit__()

    def tensors(self) -> dict[str, np.ndarray]:
        """Return the bits of every tensor, by name."""
        return self.plan.views(self._flat)

    async def offered(self) -> int:
        """Return the version that the sender has."""
        return (await self._sender.offered()).version

    async def fetch(self, label: int) -> None:
        """Get the version that the sender calls `label`.

        Raises:
            AstraflowError: VERSION_NOT_SERVED when it has another one; what a transfer raises.
        """
        offered = await self._sender.offered()
        _require(offered.version, label)
        is_delta = self._held is not None and offered.delta_base == self._held != label
        try:
            await (
                self._fetch_delta(label, offered.delta_nbytes) if is_delta else self._fetch(label)
            )
        except AstraflowError as error:
            self._held = None
            if not is_delta:
                raise
            log.warning("a delta did not come; all weights do", version=label, why=str(error))
            await self._fetch(label)
        _require(await self.offered(), label)
        self._held = label

    async def _fetch(self, label: int) -> None:
        self._held = None
        version, nbytes = await self._sender.fetch(self._flat, "full", self.plan.nbytes)
        _require(version, label)
        if nbytes != len(self._flat):
            raise AstraflowError(
                Reason.CHUNK_INVALID, f"{nbytes} of {len(self._flat)} bytes of weights came"
            )
        self.is_full, self.nbytes = True, nbytes

    async def _fetch_delta(self, label: int, nbytes: int) -> None:
        delta = np.zeros(min(nbytes, self.plan.nbytes), np.uint8)
        version, received = await self._sender.fetch(delta, "delta", self.plan.nbytes)
        _require(version, label)
        await asyncio.to_thread(apply_delta, self._flat, delta[:received])
        self.is_full, self.nbytes = False, received


def _require(found: int, label: int) -> None:
    if found != label:
        raise AstraflowError(
            Reason.VERSION_NOT_SERVED,
            f"the sender holds version {found}, not {label}; nothing was published",
        )
