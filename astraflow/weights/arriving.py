"""ArrivingTransfer: a transfer of a relay over a lane, which may begin before its version does."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, closing
from typing import Final

from astraflow.weights.served import Arriving, ServedTransfer
from astraflow.weights.signs import with_signs
from astraflow.wire.patches import SentChunk
from astraflow.wire.transfers import SentItem, TransferPlan, TransferSpec

_UNKNOWN: Final = TransferPlan(transfer_id="", patches=(), chunk_count=0, payload_nbytes=0)


class ArrivingTransfer:
    """Sends a version as it arrives; while nothing does, it says that it is there.

    Attributes:
        plan: Without patches: they are known once the version begins to arrive.
    """

    def __init__(
        self,
        store: Arriving,
        spec: TransferSpec,
        open_transfer: Callable[[TransferSpec], ServedTransfer],
    ) -> None:
        """Send nothing yet.

        Args:
            store: Where the version arrives.
            spec: What is wanted.
            open_transfer: Opens the transfer once there can be one.
        """
        self.plan = _UNKNOWN
        self.likely_nbytes = 0
        self._store = store
        self._spec = spec
        self._open_transfer = open_transfer

    async def items(self) -> AsyncGenerator[SentItem]:
        """Yield the plan and its chunks, each when it is there; Waiting between them.

        Raises:
            AstraflowError: What `Pull` answers.
        """
        async with aclosing(with_signs(self._arriving())) as items:
            async for item in items:
                yield item

    def close(self) -> None:
        """Return: what is held is held while `items` runs."""

    async def _arriving(self) -> AsyncGenerator[TransferPlan | SentChunk]:
        await self._store.expect(self._spec)
        with closing(self._open_transfer(self._spec)) as transfer:
            self.likely_nbytes = transfer.plan.payload_nbytes
            yield transfer.plan
            async with aclosing(transfer.chunks()) as chunks:
                async for sent in chunks:
                    yield sent
