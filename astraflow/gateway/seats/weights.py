"""The weights of an HTTP trainer: fetched from its sender, published as versions of the run."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np

from astraflow.client.loop_thread import LoopThread
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.versions import VersionInfo
from astraflow.gateway.legacy.frames import apply_delta
from astraflow.gateway.legacy.plan import BufferPlan
from astraflow.gateway.legacy.sender_client import SenderClient
from astraflow.rpc.tls import Tls
from astraflow.weights.publisher import WeightPublisher
from astraflow.weights.server import WeightServer


class SeatWeights:
    """Holds the bytes of one version, and moves on to what the sender says it has.

    A version is published only when the sender named it before, in its answer and after: a label is
    the version of the bytes.

    Attributes:
        server: Serves them to the pool.
        is_full: Whether the last transfer was a full one.
    """

    def __init__(
        self,
        policy_id: PolicyId,
        sender: SenderClient,
        plan: BufferPlan,
        *,
        host: str,
        loop: LoopThread,
        tls: Tls | None = None,
    ) -> None:
        """Prepare; `start` serves.

        Args:
            policy_id: Whose weights.
            sender: Has them.
            plan: Of its buffer.
            host: On which they are served to the pool.
            loop: The running one.
            tls: None: plain text.
        """
        self._sender = sender
        self._plan = plan
        self._publisher = WeightPublisher(policy_id, plan.layout)
        self._flat = np.zeros(plan.nbytes, np.uint8)
        # The sender's number of what is in `_flat`; None: nothing sound.
        self._held: int | None = None
        self.is_full = True
        self.server = WeightServer(self._publisher, listen=f"{host}:0", loop=loop, tls=tls)

    async def start(self) -> None:
        """Serve."""
        await asyncio.to_thread(self.server.__enter__)

    async def close(self) -> None:
        """Stop to serve, and let go of the sender."""
        await asyncio.to_thread(self.server.__exit__, None, None, None)
        await self._sender.__aexit__()

    async def publish_from(self, directory: Path, version: int) -> VersionInfo:
        """Encode the weights of a model directory as a version of the run.

        Raises:
            AstraflowError: LAYOUT_MISMATCH when its tensors are not the sender's.
        """
        tensors = await asyncio.to_thread(_read, directory)
        return await asyncio.to_thread(self._publisher.publish, version, tensors, step=version)

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
        except AstraflowError:
            self._held = None
            if not is_delta:
                raise
            await self._fetch(label)
        _require((await self._sender.offered()).version, label)
        self._held = label

    async def _fetch(self, label: int) -> None:
        self._held = None
        version, nbytes = await self._sender.fetch(self._flat, "full")
        _require(version, label)
        if nbytes != len(self._flat):
            raise AstraflowError(
                Reason.CHUNK_INVALID, f"{nbytes} of {len(self._flat)} bytes of weights came"
            )
        self.is_full = True

    async def _fetch_delta(self, label: int, nbytes: int) -> None:
        delta = np.zeros(max(nbytes, 1), np.uint8)
        version, received = await self._sender.fetch(delta, "delta")
        _require(version, label)
        await asyncio.to_thread(apply_delta, self._flat, delta[:received])
        self.is_full = False

    async def publish(self, version: int, *, restored_from: int | None = None) -> VersionInfo:
        """Encode what is held as a version of the run."""
        tensors = self._plan.views(self._flat)
        return await asyncio.to_thread(
            self._publisher.publish, version, tensors, step=version, restored_from=restored_from
        )


def _read(directory: Path) -> dict[str, Any]:
    from safetensors import safe_open  # noqa: PLC0415 - it loads torch

    found: dict[str, Any] = {}
    for file in sorted(directory.glob("*.safetensors")):
        opened: Any = safe_open(file, framework="pt")
        with opened as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    return found


def _require(found: int, label: int) -> None:
    if found != label:
        raise AstraflowError(
            Reason.VERSION_NOT_SERVED,
            f"the sender holds version {found}, not {label}; nothing was published",
        )
