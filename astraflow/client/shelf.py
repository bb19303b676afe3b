"""The shelf between the stream of batches and the thread that trains on them."""

from collections import OrderedDict, deque
from collections.abc import Callable
from threading import Condition

from astraflow.client.batch_stream import ReceivedBatch
from astraflow.core.batches import EndOfData
from astraflow.core.errors import AstraflowError
from astraflow.core.ids import BatchId


class Shelf:
    """Hands every batch out once, in order, to a thread that waits.

    The stream brings a batch again when it was cut; whatever was handed out or settled before
    is not shelved twice. Closing it wakes who waits.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._waiting: OrderedDict[BatchId, ReceivedBatch] = OrderedDict()
        self._given: set[BatchId] = set()
        # A copy can be on its way while the ack is: it comes soon after, or never.
        self._settled: deque[BatchId] = deque(maxlen=64)
        self._is_closed = self._is_nudged = False
        self._error: AstraflowError | None = None
        self._end: EndOfData | None = None

    @property
    def end_of_data(self) -> EndOfData | None:
        """Why no batch follows; None while some may."""
        return self._end

    @property
    def held(self) -> tuple[BatchId, ...]:
        """Batches that wait here or were handed out and are not settled."""
        with self._changed:
            return (*self._given, *self._waiting)

    def put(self, batch: ReceivedBatch) -> None:
        """Shelve a batch, unless it is or was here."""
        batch_id = batch.header.batch_id
        with self._changed:
            known = (self._given, self._waiting, self._settled)
            if not any(batch_id in place for place in known):
                self._waiting[batch_id] = batch
                self._changed.notify_all()

    def take(self, on_nudge: Callable[[], None] = lambda: None) -> ReceivedBatch | None:
        """Wait for the next batch; None when there will be none.

        Args:
            on_nudge: Called while there is none, after every `nudge`.

        Raises:
            AstraflowError: The one that it was closed with.
        """
        while True:
            with self._changed:
                self._changed.wait_for(self._has_news)
                if self._error is not None:
                    raise self._error
                if self._is_closed or self._end or self._waiting:
                    return self._taken()
                self._is_nudged = False
            on_nudge()

    def nudge(self) -> None:
        """Wake who waits for a batch, without one."""
        with self._changed:
            self._is_nudged = True
            self._changed.notify_all()

    def settle(self, batch_id: BatchId) -> None:
        """Forget a batch that the run has settled."""
        with self._changed:
            self._settled.append(batch_id)
            self._given.discard(batch_id)
            self._waiting.pop(batch_id, None)

    def keep(self, batch_ids: tuple[BatchId, ...]) -> None:
        """Drop what waits here and is no longer leased to this trainer."""
        with self._changed:
            for batch_id in self._waiting.keys() - set(batch_ids):
                del self._waiting[batch_id]

    def end(self, end_of_data: EndOfData) -> None:
        """Note that nothing follows; what waits is still handed out."""
        with self._changed:
            self._end = end_of_data
            self._changed.notify_all()

    def _has_news(self) -> bool:
        is_over = self._end is not None or self._is_closed
        return bool(self._waiting) or is_over or self._is_nudged

    def _taken(self) -> ReceivedBatch | None:
        if self._is_closed or not self._waiting:
            return None
        batch_id, batch = self._waiting.popitem(last=False)
        self._given.add(batch_id)
        return batch

    def close(self, error: AstraflowError | None = None) -> None:
        """Hand out nothing more."""
        with self._changed:
            self._is_closed = True
            self._error = self._error or error
            self._changed.notify_all()
