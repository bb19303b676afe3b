"""AnyLane: object stores by their URI, several ranks at once, every other source over its lanes."""

from collections.abc import AsyncGenerator, Sequence

from astraflow.core.layout import Layout
from astraflow.core.versions import Lane
from astraflow.rpc.tls import Tls
from astraflow.transport.lanes import Lanes
from astraflow.weights.object_lane import ObjectLane
from astraflow.weights.shard_lane import ShardLane, is_of_shards
from astraflow.wire.transfers import SentItem, TransferSpec


class AnyLane:
    """Pulls from whatever address a source has: host:port, or a URI."""

    def __init__(
        self,
        *,
        tls: Tls | None = None,
        stall_timeout_s: float = 30.0,
        lanes: Sequence[Lane] | None = None,
    ) -> None:
        """Start without a connection.

        Args:
            tls: Of TransferServices; None: plain text.
            stall_timeout_s: A source that sends nothing for so long is given up.
            lanes: See Lanes.
        """
        self._lanes = Lanes(tls=tls, stall_timeout_s=stall_timeout_s, lanes=lanes)
        self._shards = ShardLane(self._lanes)
        self._objects = ObjectLane(stall_timeout_s=stall_timeout_s)

    def pull(
        self, endpoint: str, spec: TransferSpec, transfer_token: bytes
    ) -> AsyncGenerator[SentItem]:
        """Yield the plan, then its chunks; see Lanes and ObjectLane."""
        return self._of(endpoint).pull(endpoint, spec, transfer_token)

    async def stand_ready(self, endpoint: str, spec: TransferSpec, transfer_token: bytes) -> None:
        """Ask for the version that comes next; see Lanes. Only one source sends it ahead."""
        if self._of(endpoint) is self._lanes:
            await self._lanes.stand_ready(endpoint, spec, transfer_token)

    async def forget_ready(self, spec: TransferSpec) -> None:
        """Let go of what came another way; see Lanes."""
        await self._lanes.forget_ready(spec)

    async def get_layout(self, endpoint: str, digest: bytes, transfer_token: bytes) -> Layout:
        """Return a layout; see Lanes and ObjectLane."""
        return await self._of(endpoint).get_layout(endpoint, digest, transfer_token)

    async def close(self) -> None:
        """Close all connections."""
        await self._lanes.close()
        await self._objects.close()

    def _of(self, endpoint: str) -> Lanes | ObjectLane | ShardLane:
        if "://" in endpoint:
            return self._objects
        return self._shards if is_of_shards(endpoint) else self._lanes
