"""Batches on their way to one rank of a trainer."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import structlog

from astraflow.client.hub import Hub
from astraflow.client.patience import Patience
from astraflow.core.batches import BatchHeader, BatchPart, EndOfData, StreamBatches
from astraflow.core.members import Directive
from astraflow.rpc.auth import MetadataPairs
from astraflow.wire.batches import decode_batch_header, decode_batch_part, decode_end_of_data
from astraflow.wire.common import decode_directive
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


class StreamSession(Protocol):
    """What a stream needs of the session that it belongs to."""

    @property
    def hub(self) -> Hub:
        """Where calls go."""
        ...

    @property
    def metadata(self) -> MetadataPairs:
        """What every call carries."""
        ...

    async def stay(self, stream: Callable[[Patience], Awaitable[bool]], /) -> None:
        """Run a stream, and open it again whenever it is cut, until it says that it is done."""
        ...

    def direct(self, directive: Directive) -> None:
        """Take an order of the run."""
        ...


class BatchStream:
    """StreamBatches, opened again after every cut, until the data ends.

    Attributes:
        end_of_data: Why no batch follows; None before.
    """

    def __init__(self, keeper: StreamSession, *, share: StreamBatches, sink: BatchSink) -> None:
        self._keeper = keeper
        self._stub = TrainerServiceStub(keeper.hub.channel)
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
        await self._keeper.stay(self._follow)

    async def _follow(self, patience: Patience) -> bool:
        self._header, self._parts = None, []
        call = self._stub.StreamBatches(
            encode_stream_batches(self._share), metadata=self._keeper.metadata
        )
        try:
            async for event in call:
                patience.renew()
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
                self._keeper.direct(decode_directive(event.directive))
            case _:
                log.warning("unknown event on the batch stream; is the hub newer than this?")

    def _deliver_whole(self) -> None:
        header = self._header
        if header is not None and len(self._parts) == header.part_count:
            self._header = None
            self._sink.batch(ReceivedBatch(header=header, parts=tuple(self._parts)))
