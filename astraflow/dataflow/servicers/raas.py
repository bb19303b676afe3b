"""RaasService: the run as a RaaS sees it."""

# ruff: noqa: N802 - methods are named by the contract

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial

from astraflow.core.events import TaskNacked
from astraflow.core.ids import MemberId, TaskId
from astraflow.core.members import Directive, MemberRole
from astraflow.core.rollouts import ItemAck
from astraflow.core.tasks import RolloutTask, TaskCredit
from astraflow.dataflow.hub import Hub
from astraflow.dataflow.ingest import Ingest
from astraflow.dataflow.stream_outboxes import TaskItem
from astraflow.rpc.access import Access, TokenRole
from astraflow.rpc.concurrency import either
from astraflow.rpc.streams import Context, exclusive_stream
from astraflow.storage.fault_points import FaultPoint, hit
from astraflow.wire import common, rollout, tasks
from astraflow.wire import dataflow as wire
from astraflow.wire.fields import invalid
from astraflow_proto.dataflow.v1 import raas_service_pb2 as pb


class RaasServicer:
    """Convert, one call, convert."""

    def __init__(self, hub: Hub, access: Access) -> None:
        self._hub = hub
        self._access = access
        self._ingest = Ingest(hub)

    async def JoinPool(self, request: pb.JoinPoolRequest, context: Context) -> pb.JoinPoolResponse:
        """Admit a RaaS."""
        grant = self._access.joiner(context, TokenRole.NODE)
        membership = await self._hub.join_pool(wire.decode_join_pool(request), grant)
        hit(FaultPoint.MEMBER_SAFE)
        answer = wire.encode_pool_membership(membership)
        if self._hub.payloads is not None:
            answer.payload_store.CopyFrom(rollout.encode_payload_store(self._hub.payloads.store))
        return answer

    async def StreamTasks(
        self, request_iterator: AsyncIterator[pb.StreamTasksRequest], context: Context
    ) -> None:
        """Send tasks within the credit; take credit and nacks."""
        member_id = self._access.member(context, MemberRole.RAAS)

        async def send(item: TaskItem) -> None:
            await context.write(_task_event(item))

        async with exclusive_stream(self._hub.executor.streams, member_id, "tasks", context):
            outbox = self._hub.executor.outboxes.tasks(member_id)
            await either(self._steer(member_id, request_iterator), outbox.deliver(send))

    async def _steer(
        self, member_id: MemberId, requests: AsyncIterator[pb.StreamTasksRequest]
    ) -> None:
        async for request in requests:
            self._hub.apply(_steering(member_id, request))

    async def StreamRollouts(
        self, request_iterator: AsyncIterator[pb.StreamRolloutsRequest], context: Context
    ) -> None:
        """Take rollouts and task results; acknowledge each once it is safe."""
        member_id = self._access.member(context, MemberRole.RAAS)
        async with exclusive_stream(self._hub.executor.streams, member_id, "rollouts", context):
            await self._ingest.serve(member_id, request_iterator, partial(_write_acks, context))


async def _write_acks(context: Context, acks: Sequence[ItemAck]) -> None:
    await context.write(pb.StreamRolloutsResponse(acks=map(wire.encode_item_ack, acks)))


def _steering(member_id: MemberId, request: pb.StreamTasksRequest) -> TaskCredit | TaskNacked:
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


def _task_event(item: TaskItem) -> pb.StreamTasksResponse:
    if isinstance(item, RolloutTask):
        return pb.StreamTasksResponse(task=tasks.encode_rollout_task(item))
    if isinstance(item, Directive):
        return pb.StreamTasksResponse(directive=common.encode_directive(item))
    return pb.StreamTasksResponse(cancellation=wire.encode_task_cancellation(item))
