"""What comes to one rank of a trainer: the stream, and the queue before who trains."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from threading import Condition
from typing import Any

import structlog
from grpc.aio import UnaryStreamCall

from astraflow.client.payloads import PayloadReader
from astraflow.client.session import SessionCalls
from astraflow.core.batches import BatchHeader, BatchPart, EndOfData, StreamBatches
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import BatchId
from astraflow.core.packing import laid_out
from astraflow.wire.dataflow import encode_stream_batches
from astraflow.wire.rollout import decode_batch_header, decode_batch_part, decode_end_of_data
from astraflow_proto.dataflow.v1.trainer_service_pb2 import StreamBatchesResponse
from astraflow_proto.dataflow.v1.trainer_service_pb2_grpc import TrainerServiceStub

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainerBatch:
    """One rank's share of a batch, whole.

    Attributes:
        header: Of the whole batch.
        parts: header.part_count of them, in order.
        wait_s: Seconds for which the trainer waited for it.
        error: Why it cannot be trained on, PAYLOAD_LOST; None of what a trainer is given.
    """

    header: BatchHeader
    parts: tuple[BatchPart, ...]
    wait_s: float = 0.0
    error: AstraflowError | None = None


@dataclass(frozen=True, slots=True)
class PublishOrder:
    """The run asks for a version of the present weights, where there are steps in no version."""


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """The run asks for a checkpoint of the present weights; an ack says when it is whole.

    That of the last batch is sent again with it, or that of the next one has it.
    """

    checkpoint_id: str


@dataclass(frozen=True, slots=True)
class DamageReport:
    """A reader could not verify this version; `Scrub.check_now` is meant for it."""

    version: int


TrainerItem = TrainerBatch | PublishOrder | SaveOrder | DamageReport
"""What a trainer acts on, between two steps."""


async def batch_items(
    session: SessionCalls, share: StreamBatches
) -> AsyncGenerator[TrainerItem | EndOfData]:
    """Yield what the run sends to one rank, over cuts; EndOfData is the last.

    A batch comes again after a cut until it is acknowledged. One that is still on its way from
    before the session was opened again may be leased to nobody by now: the stream is opened again,
    too, and brings what is.

    Raises:
        AstraflowError: What the hub answered; NOT_READY when it could not be reached;
            SOURCE_UNREACHABLE, CAPABILITY_MISSING of a payload store.
    """
    is_over = False
    while not is_over:
        async with aclosing(_items_of_session(session, share)) as items:
            async for item in items:
                is_over = isinstance(item, EndOfData)
                yield item


async def _items_of_session(
    session: SessionCalls, share: StreamBatches
) -> AsyncGenerator[TrainerItem | EndOfData]:
    """Yield items until the data ends, or a batch comes from before the session was opened."""
    payloads, url = PayloadReader(patience_s=session.hub.patience_s), ""
    stub, request = TrainerServiceStub(session.hub.channel), encode_stream_batches(share)
    request.sources = True
    header: BatchHeader | None = None
    parts: list[BatchPart] = []
    token = b""

    def open_stream() -> UnaryStreamCall[Any, StreamBatchesResponse]:
        nonlocal token
        token = session.token
        return stub.StreamBatches(request, metadata=session.metadata)

    async with aclosing(session.follow(open_stream)) as events:
        async for event in events:
            match event.WhichOneof("event"):
                case "header":
                    header, parts = decode_batch_header(event.header), []
                    url = event.header.payload_url
                case "part":
                    parts.append(decode_batch_part(event.part))
                case "end_of_data":
                    yield decode_end_of_data(event.end_of_data)
                    return
                case "wait_reason":
                    log.debug("waiting for a batch", why=event.wait_reason.message)
                case "publish":
                    yield PublishOrder()
                case "save":
                    yield SaveOrder(event.save.checkpoint_id)
                case "doubt":
                    yield DamageReport(event.doubt.version)
                case "directive":
                    session.take_directive(event.directive)
                case _:
                    log.warning("unknown event on the batch stream; is the hub newer than this?")
            if header is not None and len(parts) == header.part_count:
                batch = TrainerBatch(header=header, parts=tuple(parts))
                header = None
                batch = await _whole(batch, payloads, url, max_tokens=share.max_tokens)
                if token != session.token:
                    return
                yield batch


async def _whole(
    batch: TrainerBatch, payloads: PayloadReader, url: str, *, max_tokens: int
) -> TrainerBatch:
    """Return a batch with all its columns."""
    header, parts = batch.header, list(batch.parts)
    if not any(part.sources for part in parts):
        # Of a hub of an earlier release.
        return batch
    try:
        if url:
            parts = await payloads.parts(url, parts, max_tokens=max_tokens)
    except AstraflowError as error:
        if error.reason is not Reason.PAYLOAD_LOST:
            raise
        log.error("a batch cannot be read", batch_id=header.batch_id, why=error.message)  # noqa: TRY400
        return replace(batch, parts=(), error=error)
    made = await asyncio.to_thread(lambda: [laid_out(each, header.policy_ids) for each in parts])
    return replace(batch, header=replace(header, part_count=len(made)), parts=tuple(made))


class ItemQueue:
    """Hands every item out once to a thread that waits: orders first, then batches in order.

    The stream brings a batch again when it was cut; whatever was handed out or discarded before
    is not queued twice. Closing it wakes who waits.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._orders: deque[PublishOrder | SaveOrder | DamageReport] = deque()
        self._waiting: OrderedDict[BatchId, TrainerBatch] = OrderedDict()
        self._given: set[BatchId] = set()
        # A copy can be on its way while the ack is: it comes soon after, or never.
        self._discarded: deque[BatchId] = deque(maxlen=64)
        self._is_reopening = False
        self._is_closed = False
        self._error: AstraflowError | None = None
        self.end_of_data: EndOfData | None = None
        """Why no batch follows; None while some may."""

    def name_held(self) -> tuple[BatchId, ...]:
        """Return the batches that wait here or were handed out and are not acknowledged.

        Others that come before `keep` are not queued: the run does not know of them that they are
        here, and sends again what is leased to this trainer.
        """
        with self._changed:
            self._is_reopening = True
            return (*self._given, *self._waiting)

    def put(self, item: TrainerItem | EndOfData) -> None:
        """Queue an item, unless it waits or was handed out; EndOfData says that no batch follows.

        An order may come again once it was handed out.
        """
        with self._changed:
            if isinstance(item, EndOfData):
                self.end_of_data = item
            elif isinstance(item, TrainerBatch):
                batch_id = item.header.batch_id
                known = (self._given, self._waiting, self._discarded)
                if not self._is_reopening and not any(batch_id in place for place in known):
                    self._waiting[batch_id] = item
            elif item not in self._orders:
                self._orders.append(item)
            self._changed.notify_all()

    def take(self) -> TrainerItem | None:
        """Wait for the next item; None when there will be none.

        Raises:
            AstraflowError: The one that it was closed with.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._orders or self._waiting or self.end_of_data or self._is_closed
            )
            if self._error is not None:
                raise self._error
            if self._is_closed:
                return None
            if self._orders:
                return self._orders.popleft()
            if not self._waiting:
                return None
            batch_id, batch = self._waiting.popitem(last=False)
            self._given.add(batch_id)
            return batch

    def discard(self, batch_id: BatchId) -> None:
        """Forget a batch that was acknowledged."""
        with self._changed:
            self._discarded.append(batch_id)
            self._given.discard(batch_id)
            self._waiting.pop(batch_id, None)

    def keep(self, batch_ids: tuple[BatchId, ...]) -> None:
        """Drop what waits here and is no longer leased to this trainer."""
        with self._changed:
            self._is_reopening = False
            for batch_id in self._waiting.keys() - set(batch_ids):
                del self._waiting[batch_id]

    def close(self, error: AstraflowError | None = None) -> None:
        with self._changed:
            self._is_closed = True
            self._error = self._error or error
            self._changed.notify_all()
