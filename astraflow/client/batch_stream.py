"""Batches on their way to one rank of a trainer: the stream, and the queue before who trains."""

from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from threading import Condition
from typing import Protocol

import structlog

from astraflow.client.hub import HubChannel
from astraflow.core.batches import BatchHeader, BatchPart, EndOfData, StreamBatches
from astraflow.core.errors import AstraflowError
from astraflow.core.ids import BatchId
from astraflow.core.members import Directive
from astraflow.rpc.auth import MetadataPairs
from astraflow.rpc.concurrency import Retry
from astraflow.wire.common import decode_directive
from astraflow.wire.rollout import decode_batch_header, decode_batch_part, decode_end_of_data
from astraflow.wire.trainer import encode_stream_batches
from astraflow_proto.dataflow.v1 import trainer_service_pb2 as pb
from astraflow_proto.dataflow.v1.trainer_service_pb2_grpc import TrainerServiceStub

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReceivedBatch:
    """One rank's share of a batch, whole."""

    header: BatchHeader
    parts: tuple[BatchPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSink:
    """Who takes what the stream brings; the calls must not block.

    Attributes:
        batch: A whole batch; the same one may come again after a cut.
        publish: The run asks for a version after the step in progress.
        save: The run asks for a checkpoint with this id after the step in progress.
        doubt: A reader could not verify this version.
    """

    batch: Callable[[ReceivedBatch], None]
    publish: Callable[[], None]
    save: Callable[[str], None]
    doubt: Callable[[int], None]


class BatchSession(Protocol):
    """What a stream needs of the session that it belongs to."""

    @property
    def hub(self) -> HubChannel: ...

    @property
    def metadata(self) -> MetadataPairs: ...

    async def run_stream(self, stream: Callable[[Retry], Awaitable[bool]], /) -> None:
        """Run a stream, and open it again whenever it is cut, until it says that it is done."""
        ...

    def direct(self, directive: Directive) -> None: ...


class BatchStream:
    """StreamBatches, opened again after every cut, until the data ends.

    Attributes:
        end_of_data: Why no batch follows; None before.
    """

    def __init__(self, session: BatchSession, *, share: StreamBatches, sink: BatchSink) -> None:
        self._session = session
        self._stub = TrainerServiceStub(session.hub.channel)
        self._share = share
        self._sink = sink
        self._header: BatchHeader | None = None
        self._parts: list[BatchPart] = []
        self.end_of_data: EndOfData | None = None

    async def run(self) -> None:
        """Follow the stream to the end of the data.

        Raises:
            AstraflowError: What the hub answered; NOT_READY when it could not be reached.
        """
        await self._session.run_stream(self._follow)

    async def _follow(self, retry: Retry) -> bool:
        self._header, self._parts = None, []
        call = self._stub.StreamBatches(
            encode_stream_batches(self._share), metadata=self._session.metadata
        )
        try:
            async for event in call:
                retry.reset()
                self._dispatch(event)
        finally:
            call.cancel()
        return self.end_of_data is not None

    def _dispatch(self, event: pb.StreamBatchesResponse) -> None:
        match event.WhichOneof("event"):
            case "header":
                self._header, self._parts = decode_batch_header(event.header), []
                self._deliver_whole()
            case "part":
                self._parts.append(decode_batch_part(event.part))
                self._deliver_whole()
            case "end_of_data":
                self.end_of_data = decode_end_of_data(event.end_of_data)
            case "wait_reason":
                log.debug("waiting for a batch", why=event.wait_reason.message)
            case "publish":
                self._sink.publish()
            case "save":
                self._sink.save(event.save.checkpoint_id)
            case "doubt":
                self._sink.doubt(event.doubt.version)
            case "directive":
                self._session.direct(decode_directive(event.directive))
            case _:
                log.warning("unknown event on the batch stream; is the hub newer than this?")

    def _deliver_whole(self) -> None:
        header = self._header
        if header is not None and len(self._parts) == header.part_count:
            self._header = None
            self._sink.batch(ReceivedBatch(header=header, parts=tuple(self._parts)))


class BatchQueue:
    """Hands every batch out once, in order, to a thread that waits.

    The stream brings a batch again when it was cut; whatever was handed out or discarded before
    is not queued twice. Closing it wakes who waits.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._waiting: OrderedDict[BatchId, ReceivedBatch] = OrderedDict()
        self._given: set[BatchId] = set()
        # A copy can be on its way while the ack is: it comes soon after, or never.
        self._discarded: deque[BatchId] = deque(maxlen=64)
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
        """Queue a batch, unless it is or was here."""
        batch_id = batch.header.batch_id
        with self._changed:
            known = (self._given, self._waiting, self._discarded)
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

    def discard(self, batch_id: BatchId) -> None:
        """Forget a batch that the run has settled."""
        with self._changed:
            self._discarded.append(batch_id)
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
        with self._changed:
            self._is_closed = True
            self._error = self._error or error
            self._changed.notify_all()
