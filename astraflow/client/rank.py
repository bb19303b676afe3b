"""The batches of one more rank of a trainer, for code that blocks."""

from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import replace
from typing import Self

from astraflow.client.batch_stream import ItemQueue, TrainerBatch, batch_items
from astraflow.client.hub import HubChannel
from astraflow.client.loop_thread import LoopThread
from astraflow.client.session import SessionCalls
from astraflow.core.batches import EndOfData, StreamBatches
from astraflow.core.clock import SystemClock
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import BatchId
from astraflow.rpc.tls import Tls


class RankClient:
    """Takes one rank's share of the batches that another process, rank 0, decides on.

    Rank 0 holds the session, acknowledges whole batches and publishes; this one only reads.

    Example:
        with RankClient(hub=hub, loop=loop, session_token=token, share=share) as client:
            batch = client.take(batch_id)  # the one that rank 0 takes
            train(batch)
            client.release(batch_id)
    """

    def __init__(
        self,
        *,
        hub: str,
        loop: LoopThread,
        session_token: bytes,
        share: StreamBatches,
        tls: Tls | None = None,
        patience_s: float = 30.0,
    ) -> None:
        """Open no stream; `with` does. The loop runs, the token is of rank 0's session."""
        self._loop = loop
        self._share = share
        self._clock = SystemClock()
        self._queue = ItemQueue()
        self._hub = (hub, tls, patience_s)
        self._token = session_token
        self._session: SessionCalls | None = None
        self._reading: Future[None] = Future()

    def __enter__(self) -> Self:
        self._reading = self._loop.spawn(self._read())
        self._reading.add_done_callback(self._ended)
        return self

    def __exit__(self, *_: object) -> None:
        self._reading.cancel()

    def renew(self, session_token: bytes) -> None:
        """Go on with the token of the session that rank 0 opened again; from any thread."""
        self._token = session_token
        if self._session is not None:
            self._session.token = session_token

    def take(self, batch_id: BatchId) -> TrainerBatch:
        """Wait for this rank's share of a batch; what was sent before it is dropped.

        Raises:
            AstraflowError: PAYLOAD_LOST for a batch that is to be returned; LEASE_LOST when the
                data ends without it; what the stream ended with.
        """
        started = self._clock.monotonic()
        while isinstance(found := self._queue.take(), TrainerBatch):
            if found.header.batch_id == batch_id:
                if found.error is not None:
                    raise found.error
                return replace(found, wait_s=self._clock.monotonic() - started)
            self._queue.discard(found.header.batch_id)
        raise AstraflowError(
            Reason.LEASE_LOST, f"rank {self._share.rank} was not sent its share of {batch_id}"
        )

    def release(self, batch_id: BatchId) -> None:
        """Forget a batch that was trained on."""
        self._queue.discard(batch_id)

    async def _read(self) -> None:
        address, tls, patience_s = self._hub
        async with HubChannel(address, tls=tls, patience_s=patience_s) as hub:
            self._session = SessionCalls(hub, self._token)
            # Orders are for rank 0.
            async with aclosing(batch_items(self._session, self._share)) as items:
                async for item in items:
                    if isinstance(item, TrainerBatch | EndOfData):
                        self._queue.put(item)

    def _ended(self, reading: "Future[None]") -> None:
        if reading.cancelled():
            return
        error = reading.exception()
        if isinstance(error, AstraflowError):
            self._queue.close(error)
        elif error is not None:
            said = f"the stream of rank {self._share.rank} failed: {error!r}"
            self._queue.close(AstraflowError(Reason.INTERNAL, said))
