"""TrainerService: the run as a trainer sees it."""

# ruff: noqa: N802 - methods are named by the contract

import asyncio
from dataclasses import replace
from functools import partial

from astraflow.core.batches import EndOfData
from astraflow.core.effects import SendBatch, SendPublishOrder, SendSaveOrder, SendScrubOrder
from astraflow.core.events import VersionPublished
from astraflow.core.ids import PolicyId
from astraflow.core.members import Directive, MemberRole
from astraflow.core.status import WaitReason
from astraflow.dataflow.hub import Hub
from astraflow.dataflow.stream_outboxes import INTERVAL_S, BatchItem, Order, explain_waits
from astraflow.rpc.access import Access, TokenRole
from astraflow.rpc.concurrency import either
from astraflow.rpc.streams import Context, exclusive_stream
from astraflow.storage.fault_points import FaultPoint, hit
from astraflow.wire import common, rollout, versions
from astraflow.wire import dataflow as wire
from astraflow.wire.common import encode_wait_reason
from astraflow.wire.signatures import require_signed
from astraflow_proto.dataflow.v1 import trainer_service_pb2 as pb

# Making a part of this many takes some milliseconds of the event loop.
_LARGE_TOKEN_COUNT = 1 << 16


class TrainerServicer:
    """Convert, one call, convert."""

    def __init__(self, hub: Hub, access: Access, *, wait_interval_s: float = INTERVAL_S) -> None:
        self._hub = hub
        self._access = access
        self._wait_interval_s = wait_interval_s
        self._payload_url = hub.payloads.store.url if hub.payloads else ""

    async def RegisterTrainer(
        self, request: pb.RegisterTrainerRequest, context: Context
    ) -> pb.RegisterTrainerResponse:
        """Join the run for one policy."""
        grant = self._access.joiner(context, TokenRole.TRAINER, request.policy_id)
        registration = await self._hub.register_trainer(
            wire.decode_register_trainer(request), grant
        )
        hit(FaultPoint.MEMBER_SAFE)
        seed = self._access.signing_seed(registration.run_id, PolicyId(request.policy_id))
        return wire.encode_trainer_registration(replace(registration, signing_seed=seed))

    async def StreamBatches(self, request: pb.StreamBatchesRequest, context: Context) -> None:
        """Send batches as they become ready; while there is none, say why."""
        member_id = self._access.member(context, MemberRole.TRAINER)
        stream = replace(wire.decode_stream_batches(request), member_id=member_id)

        async def send(item: BatchItem) -> None:
            if isinstance(item, SendBatch):
                await _send_batch(item, context, self._payload_url)
            else:
                await context.write(_event(item))

        explain = partial(self._hub.explain, member_id)
        async with exclusive_stream(
            self._hub.executor.streams, member_id, f"batches/{stream.rank}", context
        ):
            outbox = await self._hub.open_batches(stream)
            await either(
                outbox.deliver(send),
                explain_waits(outbox, explain, interval_s=self._wait_interval_s),
            )

    async def AckBatch(self, request: pb.AckBatchRequest, context: Context) -> pb.AckBatchResponse:
        """Settle a batch."""
        member_id = self._access.member(context, MemberRole.TRAINER)
        is_settled = await self._hub.take(
            replace(wire.decode_ack_batch(request), member_id=member_id)
        )
        hit(FaultPoint.BATCH_SETTLED)
        return pb.AckBatchResponse(settled=is_settled)

    async def PublishVersion(
        self, request: pb.PublishVersionRequest, context: Context
    ) -> pb.PublishVersionResponse:
        """Announce weights that can now be pulled."""
        member_id = self._access.member(context, MemberRole.TRAINER)
        info = versions.decode_version_info(request.version)
        for patch in info.patches:
            require_signed(info, patch)
        next_version = await self._hub.take(VersionPublished(member_id=member_id, info=info))
        hit(FaultPoint.VERSION_SAFE)
        return pb.PublishVersionResponse(next_version=next_version)


async def _send_batch(batch: SendBatch, context: Context, payload_url: str) -> None:
    """Write a batch part by part, as the peer reads it; large parts are made on a thread."""
    header = rollout.encode_batch_header(batch.header)
    if batch.parts.has_payloads:
        header.payload_url = payload_url
    await context.write(pb.StreamBatchesResponse(header=header))
    hit(FaultPoint.BATCH_HEADER_SENT)
    for index in range(len(batch.parts)):
        if batch.parts.token_count(index) > _LARGE_TOKEN_COUNT:
            message = await asyncio.to_thread(_part_event, batch, index)
        else:
            message = _part_event(batch, index)
        await context.write(message)


def _part_event(batch: SendBatch, index: int) -> pb.StreamBatchesResponse:
    message = pb.StreamBatchesResponse()
    rollout.fill_batch_part(message.part, batch.parts[index])
    return message


def _event(
    item: EndOfData | WaitReason | Directive | Order,
) -> pb.StreamBatchesResponse:
    match item:
        case SendPublishOrder():
            return pb.StreamBatchesResponse(publish=pb.PublishOrder())
        case SendSaveOrder(checkpoint_id=checkpoint_id):
            return pb.StreamBatchesResponse(save=pb.SaveOrder(checkpoint_id=checkpoint_id))
        case SendScrubOrder():
            return pb.StreamBatchesResponse(doubt=pb.VersionDoubt(version=item.version))
        case EndOfData():
            return pb.StreamBatchesResponse(end_of_data=rollout.encode_end_of_data(item))
        case WaitReason():
            return pb.StreamBatchesResponse(wait_reason=encode_wait_reason(item))
        case Directive():
            return pb.StreamBatchesResponse(directive=common.encode_directive(item))
