"""The desk of one trainer: the batch in its hands, and those that wait for it."""

import asyncio
from collections import OrderedDict, deque

from astraflow.client.batch_stream import ReceivedBatch
from astraflow.core.batches import EndOfData
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import BatchId


class BatchDesk:
    """Hands out one batch until it is settled: to whoever asks again, the same one.

    Attributes:
        in_hand: What was handed out and is not settled.
        drawn_count: Batches handed out, each counted once.
        is_delivered: Whether all of the batch in hand was written to its reader.
    """

    def __init__(self) -> None:
        self.in_hand: ReceivedBatch | None = None
        self.drawn_count = 0
        self.is_delivered = False
        self._drawn_for: int | None = None
        self._waiting: OrderedDict[BatchId, ReceivedBatch] = OrderedDict()
        # A copy may come while the ack of a batch is on its way.
        self._settled: deque[BatchId] = deque(maxlen=64)
        self._end: EndOfData | None = None
        self._error: AstraflowError | None = None
        self._news = asyncio.Event()

    @property
    def held(self) -> tuple[BatchId, ...]:
        """Batches that are in hand or wait."""
        in_hand = () if self.in_hand is None else (self.in_hand.header.batch_id,)
        return (*in_hand, *self._waiting)

    def put(self, batch: ReceivedBatch) -> None:
        """Take a batch of the stream, unless it is or was here."""
        batch_id = batch.header.batch_id
        if batch_id not in self.held and batch_id not in self._settled:
            self._waiting[batch_id] = batch
            self._news.set()

    def keep(self, batch_ids: tuple[BatchId, ...]) -> None:
        """Drop what is no longer leased to this trainer."""
        for batch_id in self._waiting.keys() - set(batch_ids):
            del self._waiting[batch_id]

    def end(self, end_of_data: EndOfData) -> None:
        """Note that nothing follows what waits."""
        self._end = end_of_data
        self._news.set()

    def close(self, error: AstraflowError) -> None:
        """Hand out nothing more."""
        self._error = self._error or error
        self._news.set()

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._error is not None

    @property
    def is_over(self) -> bool:
        """Whether the data has ended and all of it was settled."""
        return self._end is not None and not self.held

    def is_done_with(self, label: int | None) -> bool:
        """Whether asking for the batch after a version says that the one in hand was used."""
        if self.in_hand is None or not self.is_delivered:
            return False
        return label is None or label != self._drawn_for

    def require_open(self) -> None:
        """Raise what it was closed with."""
        if self._error is not None:
            raise self._error

    async def take(self, label: int | None) -> ReceivedBatch:
        """Return the batch in hand, or wait for the next.

        Args:
            label: Version after which it is asked for; None: not said.

        Raises:
            AstraflowError: RUN_ENDED when there will be none; what the desk was closed with.
        """
        while self.in_hand is None:
            if self._waiting and not self.is_closed:
                self.in_hand = self._waiting.popitem(last=False)[1]
                self._drawn_for, self.is_delivered = label, False
                self.drawn_count += 1
            elif self._end is not None:
                raise AstraflowError(
                    Reason.RUN_ENDED,
                    f"no batch follows: {self._end.cause} after {self._end.batch_count} batches",
                )
            else:
                self.require_open()
                self._news.clear()
                await self._news.wait()
        return self.in_hand

    def settle(self) -> None:
        """Forget the batch in hand."""
        if self.in_hand is not None:
            self._settled.append(self.in_hand.header.batch_id)
            self.in_hand = None
