"""The services that members call: of every role, of nodes, and of trainers."""

# ruff: noqa: N802 - methods are named by the contract

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from astraflow.core.batches import EndOfData
from astraflow.core.effects import (
    Renewal,
    SendBatch,
    SendPublishOrder,
    SendSaveOrder,
    SendScrubOrder,
)
from astraflow.core.events import (
    FailureReported,
    MemberKeptAlive,
    MemberLeft,
    PublishRequested,
    TaskNacked,
    VersionReported,
)
from astraflow.core.ids import MemberId, PolicyId, TaskId
from astraflow.core.members import Directive, MemberRole, RaasLoad, TrainerLoad
from astraflow.core.packing import laid_out
from astraflow.core.rollouts import ItemAck
from astraflow.core.status import WaitReason
from astraflow.core.tasks import RolloutTask, TaskCredit
from astraflow.core.versions import PublishAnswer
from astraflow.dataflow.commits import UNSAFE_COUNT
from astraflow.dataflow.hub import Hub
from astraflow.dataflow.ingest import Ingest
from astraflow.dataflow.stream_outboxes import INTERVAL_S, BatchItem, Order, TaskItem, explain_waits
from astraflow.rpc.access import Access, TokenRole
from astraflow.rpc.auth import Context
from astraflow.rpc.concurrency import either
from astraflow.rpc.server import takes_bytes
from astraflow.rpc.streams import exclusive_stream
from astraflow.storage.fault_points import FaultPoint, hit
from astraflow.wire import common, rollout, tasks, versions
from astraflow.wire import dataflow as wire
from astraflow.wire.fields import encode_span, encode_time, invalid
from astraflow.wire.signatures import require_signed
from astraflow_proto.dataflow.v1 import raas_service_pb2 as raas_pb
from astraflow_proto.dataflow.v1 import session_service_pb2 as session_pb
from astraflow_proto.dataflow.v1 import trainer_service_pb2 as trainer_pb
from astraflow_proto.weights.v1 import version_service_pb2 as version_pb

# Of one member at once, of all policies; each is woken by every version.
_WATCHES: Final = [f"versions/{number}" for number in range(64)]


class MemberServicer:
    """SessionService, VersionService, RaasService and TrainerService of one hub."""

    def __init__(self, hub: Hub, access: Access, *, wait_interval_s: float = INTERVAL_S) -> None:
        self._hub = hub
        self._access = access
        self._ingest = Ingest(hub)
        self._encoder = versions.VersionEncoder()
        self._wait_interval_s = wait_interval_s
        self._payload_url = hub.payloads.store.url if hub.payloads else ""

    async def KeepAlive(
        self, request: session_pb.KeepAliveRequest, context: Context
    ) -> session_pb.KeepAliveResponse:
        """Renew the caller's session."""
        member_id = self._access.member(context)
        kept: Renewal = await self._hub.take(
            MemberKeptAlive(member_id=member_id, load=_load(request))
        )
        return session_pb.KeepAliveResponse(
            ttl=encode_span(kept.ttl),
            directive=common.encode_directive(kept.directive),
            server_time=encode_time(kept.server_time),
        )

    async def ReportFailure(
        self, request: session_pb.ReportFailureRequest, context: Context
    ) -> session_pb.ReportFailureResponse:
        """Take what failed beside any rollout."""
        member_id = self._access.member(context)
        failure = common.decode_failure(request.failure)
        await self._hub.take(FailureReported(member_id=member_id, failure=failure))
        return session_pb.ReportFailureResponse()

    async def EndSession(
        self, request: session_pb.EndSessionRequest, context: Context
    ) -> session_pb.EndSessionResponse:
        """Return at once what the caller holds."""
        member_id = self._access.member(context, may_be_ended=True)
        await self._hub.take(MemberLeft(member_id=member_id, message=request.message))
        return session_pb.EndSessionResponse()

    async def ListVersions(
        self, request: version_pb.ListVersionsRequest, context: Context
    ) -> version_pb.ListVersionsResponse:
        """Return what can still be pulled, oldest first."""
        caller = self._access.anyone(context)
        known = self._hub.run.versions(PolicyId(request.policy_id), caller)
        told = await self._hub.when_safe(known)
        return version_pb.ListVersionsResponse(versions=map(self._encoder.encode, told))

    async def WatchVersions(
        self, request: version_pb.WatchVersionsRequest, context: Context
    ) -> None:
        """Send versions as they are published."""
        member_id = self._access.member(context)
        after = request.after_version if request.HasField("after_version") else None
        policy_id = PolicyId(request.policy_id)
        streams = self._hub.executor.streams
        free = (each for each in _WATCHES if not streams.has(member_id, each))
        async with exclusive_stream(streams, member_id, next(free, _WATCHES[0]), context):
            async for info in self._hub.watch_versions(policy_id, after, member_id):
                version = self._encoder.encode(info)
                await context.write(version_pb.WatchVersionsResponse(version=version))

    async def ListSources(
        self, request: version_pb.ListSourcesRequest, context: Context
    ) -> version_pb.ListSourcesResponse:
        """Return who has a version now."""
        caller = self._access.anyone(context)
        sources = self._hub.run.sources(PolicyId(request.policy_id), request.version, caller)
        told = await self._hub.when_safe(sources)
        return version_pb.ListSourcesResponse(sources=map(versions.encode_source, told))

    async def ReportVersion(
        self, request: version_pb.ReportVersionRequest, context: Context
    ) -> version_pb.ReportVersionResponse:
        """Take where a version stands on the caller."""
        member_id = self._access.member(context)
        report = versions.decode_version_report(request)
        # A pool reports a version at about the same time.
        await self._hub.take_with_others(VersionReported(member_id=member_id, report=report))
        return version_pb.ReportVersionResponse()

    async def RequestPublish(
        self, request: version_pb.RequestPublishRequest, context: Context
    ) -> version_pb.RequestPublishResponse:
        """Ask the trainer of a policy for a version."""
        asked = PublishRequested(
            member_id=self._access.member(context, MemberRole.RAAS),
            policy_id=PolicyId(request.policy_id),
        )
        answer: PublishAnswer = await self._hub.take(asked)
        return version_pb.RequestPublishResponse(
            pending=answer.is_pending, newest_version=answer.newest_version
        )

    async def JoinPool(
        self, request: raas_pb.JoinPoolRequest, context: Context
    ) -> raas_pb.JoinPoolResponse:
        """Admit a RaaS."""
        grant = self._access.joiner(context, TokenRole.NODE)
        membership = await self._hub.join_pool(wire.decode_join_pool(request), grant)
        hit(FaultPoint.MEMBER_SAFE)
        answer = wire.encode_pool_membership(membership)
        if self._hub.payloads is not None:
            answer.payload_store.CopyFrom(rollout.encode_payload_store(self._hub.payloads.store))
        return answer

    async def StreamTasks(
        self, request_iterator: AsyncIterator[raas_pb.StreamTasksRequest], context: Context
    ) -> None:
        """Send tasks within the credit; take credit and nacks."""
        member_id = self._access.member(context, MemberRole.RAAS)

        async def send(item: TaskItem) -> None:
            await context.write(_task_event(item))

        async def steer() -> None:
            commits = self._hub.commits
            async for request in request_iterator:
                self._hub.apply(_steering(member_id, request))
                # What the journal has yet to take is held here.
                await commits.passed(commits.ticket - UNSAFE_COUNT)

        async with exclusive_stream(self._hub.executor.streams, member_id, "tasks", context):
            outbox = self._hub.executor.outboxes.tasks(member_id)
            await either(steer(), outbox.deliver(send))

    @takes_bytes
    async def StreamRollouts(
        self, request_iterator: AsyncIterator[bytes], context: Context
    ) -> None:
        """Take rollouts and task results; acknowledge each once it is safe."""
        member_id = self._access.member(context, MemberRole.RAAS)
        async with exclusive_stream(self._hub.executor.streams, member_id, "rollouts", context):
            await self._ingest.serve(member_id, request_iterator, partial(_write_acks, context))

    async def RegisterTrainer(
        self, request: trainer_pb.RegisterTrainerRequest, context: Context
    ) -> trainer_pb.RegisterTrainerResponse:
        """Join the run for one policy."""
        grant = self._access.joiner(context, TokenRole.TRAINER, request.policy_id)
        registration = await self._hub.register_trainer(
            wire.decode_register_trainer(request), grant
        )
        hit(FaultPoint.MEMBER_SAFE)
        seed = self._access.signing_seed(registration.run_id, PolicyId(request.policy_id))
        return wire.encode_trainer_registration(replace(registration, signing_seed=seed))

    async def StreamBatches(
        self, request: trainer_pb.StreamBatchesRequest, context: Context
    ) -> None:
        """Send batches as they become ready; while there is none, say why."""
        member_id = self._access.member(context, MemberRole.TRAINER)
        stream = replace(wire.decode_stream_batches(request), member_id=member_id)

        async def send(item: BatchItem) -> None:
            if isinstance(item, SendBatch):
                await self._send_batch(item, context, has_sources=request.sources)
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

    async def AckBatch(
        self, request: trainer_pb.AckBatchRequest, context: Context
    ) -> trainer_pb.AckBatchResponse:
        """Settle a batch."""
        member_id = self._access.member(context, MemberRole.TRAINER)
        is_settled = await self._hub.take(
            replace(wire.decode_ack_batch(request), member_id=member_id)
        )
        hit(FaultPoint.BATCH_SETTLED)
        return trainer_pb.AckBatchResponse(settled=is_settled)

    async def PublishVersion(
        self, request: trainer_pb.PublishVersionRequest, context: Context
    ) -> trainer_pb.PublishVersionResponse:
        """Announce weights that can now be pulled."""
        member_id = self._access.member(context, MemberRole.TRAINER)
        info = versions.decode_version_info(request.version)
        for patch in info.patches:
            require_signed(info, patch)
        next_version = await self._hub.publish(member_id, info)
        hit(FaultPoint.VERSION_SAFE)
        return trainer_pb.PublishVersionResponse(next_version=next_version)

    async def _send_batch(self, batch: SendBatch, context: Context, *, has_sources: bool) -> None:
        """Write a batch part by part, as the peer reads it."""
        header = rollout.encode_batch_header(batch.header)
        if batch.parts.has_payloads:
            header.payload_url = self._payload_url
            has_sources = True
        await context.write(trainer_pb.StreamBatchesResponse(header=header))
        hit(FaultPoint.BATCH_HEADER_SENT)
        for part in batch.parts:
            made = part
            if not has_sources:
                # Takes some milliseconds.
                made = await asyncio.to_thread(laid_out, part, batch.header.policy_ids)
            await context.write(wire.write_batch_part(made))


def _load(request: session_pb.KeepAliveRequest) -> RaasLoad | TrainerLoad | None:
    match request.WhichOneof("load"):
        case "raas":
            return common.decode_raas_load(request.raas)
        case "trainer":
            return common.decode_trainer_load(request.trainer)
        case _:
            return None


async def _write_acks(context: Context, acks: Sequence[ItemAck]) -> None:
    await context.write(raas_pb.StreamRolloutsResponse(acks=map(wire.encode_item_ack, acks)))


def _steering(member_id: MemberId, request: raas_pb.StreamTasksRequest) -> TaskCredit | TaskNacked:
    match request.WhichOneof("request"):
        case "open":
            credit = wire.decode_task_credit(request.open.credit)
        case "credit":
            credit = wire.decode_task_credit(request.credit)
        case "nack":
            return TaskNacked(
                member_id=member_id,
                task_id=TaskId(request.nack.task_id),
                failure=common.decode_failure(request.nack.failure),
            )
        case _:
            raise invalid("request", "on StreamTasks it is open, credit or nack")
    return replace(credit, member_id=member_id)


def _task_event(item: TaskItem) -> raas_pb.StreamTasksResponse:
    if isinstance(item, RolloutTask):
        return raas_pb.StreamTasksResponse(task=tasks.encode_rollout_task(item))
    if isinstance(item, Directive):
        return raas_pb.StreamTasksResponse(directive=common.encode_directive(item))
    return raas_pb.StreamTasksResponse(cancellation=wire.encode_task_cancellation(item))


def _event(
    item: EndOfData | WaitReason | Directive | Order,
) -> trainer_pb.StreamBatchesResponse:
    match item:
        case SendPublishOrder():
            return trainer_pb.StreamBatchesResponse(publish=trainer_pb.PublishOrder())
        case SendSaveOrder(checkpoint_id=checkpoint_id):
            return trainer_pb.StreamBatchesResponse(
                save=trainer_pb.SaveOrder(checkpoint_id=checkpoint_id)
            )
        case SendScrubOrder():
            return trainer_pb.StreamBatchesResponse(
                doubt=trainer_pb.VersionDoubt(version=item.version)
            )
        case EndOfData():
            return trainer_pb.StreamBatchesResponse(end_of_data=rollout.encode_end_of_data(item))
        case WaitReason():
            return trainer_pb.StreamBatchesResponse(wait_reason=common.encode_wait_reason(item))
        case Directive():
            return trainer_pb.StreamBatchesResponse(directive=common.encode_directive(item))
