"""TrainerService: the run as a trainer sees it."""

# ruff: noqa: N802 - methods are named by the contract

from collections.abc import Iterator
from datetime import timedelta
from functools import partial

from astraflow.core.batches import AckBatch, EndOfData, StreamBatches
from astraflow.core.effects import SendBatch
from astraflow.core.events import BatchAcked, BatchStreamOpened, VersionPublished
from astraflow.core.ids import MemberId
from astraflow.core.members import Directive, Role
from astraflow.core.status import WaitReason
from astraflow.dataflow.access import Access
from astraflow.dataflow.hub import Hub
from astraflow.dataflow.mailroom import BatchItem
from astraflow.dataflow.streams import Context, either, seated
from astraflow.dataflow.waits import INTERVAL_S, tell_waits
from astraflow.wire import common, rollout, weights
from astraflow.wire import dataflow as wire
from astraflow_proto.dataflow.v1 import trainer_service_pb2 as pb


class TrainerServicer:
    """Convert, one call, convert."""

    def __init__(self, hub: Hub, access: Access) -> None:
        self._hub = hub
        self._access = access

    async def RegisterTrainer(
        self, request: pb.RegisterTrainerRequest, context: Context
    ) -> pb.RegisterTrainerResponse:
        """Join the run for one policy."""
        self._access.joiner(context)
        registration = self._hub.register_trainer(wire.decode_register_trainer(request))
        return wire.encode_trainer_registration(registration)

    async def StreamBatches(self, request: pb.StreamBatchesRequest, context: Context) -> None:
        """Send batches as they become ready; while there is none, say why."""
        member_id = self._access.member(context, Role.TRAINER)
        asked = wire.decode_stream_batches(request)

        async def send(item: BatchItem) -> None:
            for event in _batch_events(item):
                await context.write(event)

        async with seated(self._hub.hands.seats, member_id, f"batches/{asked.rank}", context):
            outbox = self._hub.open_batches(_opened(member_id, asked))
            await either(
                outbox.deliver(send),
                tell_waits(outbox, partial(self._hub.explain, member_id), interval_s=INTERVAL_S),
            )

    async def AckBatch(self, request: pb.AckBatchRequest, context: Context) -> pb.AckBatchResponse:
        """Settle a batch."""
        member_id = self._access.member(context, Role.TRAINER)
        is_settled = self._hub.apply(_acked(member_id, wire.decode_ack_batch(request)))
        return pb.AckBatchResponse(settled=is_settled)

    async def PublishVersion(
        self, request: pb.PublishVersionRequest, context: Context
    ) -> pb.PublishVersionResponse:
        """Announce weights that can now be pulled."""
        member_id = self._access.member(context, Role.TRAINER)
        info = weights.decode_version_info(request.version)
        next_version = self._hub.publish_version(VersionPublished(member_id=member_id, info=info))
        return pb.PublishVersionResponse(next_version=next_version)


def _opened(member_id: MemberId, asked: StreamBatches) -> BatchStreamOpened:
    return BatchStreamOpened(
        member_id=member_id,
        rank=asked.rank,
        world_size=asked.world_size,
        max_outstanding=asked.max_outstanding,
        max_tokens=asked.max_tokens,
    )


def _acked(member_id: MemberId, ack: AckBatch) -> BatchAcked:
    return BatchAcked(
        member_id=member_id,
        batch_id=ack.batch_id,
        outcome=ack.outcome,
        rank=ack.rank,
        step=ack.step,
        checkpoint_id=ack.checkpoint_id,
        wait_s=_seconds(ack.wait),
        train_s=_seconds(ack.train),
        metrics=ack.metrics,
    )


def _seconds(span: timedelta | None) -> float:
    return 0.0 if span is None else span.total_seconds()


def _batch_events(item: BatchItem) -> Iterator[pb.StreamBatchesResponse]:
    """Yield the messages of one item; a batch is coded part by part, as the peer reads it."""
    match item:
        case SendBatch():
            yield pb.StreamBatchesResponse(header=rollout.encode_batch_header(item.header))
            for part in item.parts:
                yield pb.StreamBatchesResponse(part=rollout.encode_batch_part(part))
        case EndOfData():
            yield pb.StreamBatchesResponse(end_of_data=rollout.encode_end_of_data(item))
        case WaitReason():
            yield pb.StreamBatchesResponse(wait_reason=wire.encode_wait_reason(item))
        case Directive():
            yield pb.StreamBatchesResponse(directive=common.encode_directive(item))
