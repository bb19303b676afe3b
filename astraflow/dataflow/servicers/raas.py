"""RaasService: the run as a RaaS sees it."""

# ruff: noqa: N802 - methods are named by the contract

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TypeAlias

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.events import CreditGiven, RolloutArrived, TaskFinished, TaskNacked
from astraflow.core.ids import MemberId, TaskId
from astraflow.core.members import Directive, MemberRole
from astraflow.core.rollouts import Disposition, ItemAck
from astraflow.core.tasks import RolloutTask
from astraflow.dataflow.hub import Arrival, Hub, apply_all
from astraflow.dataflow.stream_outboxes import TaskItem
from astraflow.rpc.access import Access
from astraflow.rpc.concurrency import either, together
from astraflow.rpc.streams import Context, exclusive_stream
from astraflow.storage.fault_points import FaultPoint, hit
from astraflow.wire import common, rollout, tasks
from astraflow.wire import raas as wire
from astraflow.wire.fields import invalid
from astraflow_proto.dataflow.v1 import raas_service_pb2 as pb

# Messages of one stream whose acks wait for the journal; then the peer waits.
_UNACKED_COUNT = 32

# Taking so many items needs a few ms of the event loop; they are what came together.
_TOGETHER_COUNT = 64

# Acks with the ticket of what they wait for; None: the peer has sent everything.
_Taken: TypeAlias = "asyncio.Queue[tuple[int, list[ItemAck]] | None]"


class RaasServicer:
    """Convert, one call, convert."""

    def __init__(self, hub: Hub, access: Access) -> None:
        self._hub = hub
        self._access = access

    async def JoinPool(self, request: pb.JoinPoolRequest, context: Context) -> pb.JoinPoolResponse:
        """Admit a RaaS."""
        self._access.joiner(context)
        membership = await self._hub.join_pool(wire.decode_join_pool(request))
        hit(FaultPoint.MEMBER_SAFE)
        return wire.encode_pool_membership(membership)

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
        taken: _Taken = asyncio.Queue(_UNACKED_COUNT)
        async with exclusive_stream(self._hub.executor.streams, member_id, "rollouts", context):
            await together(
                self._receive(member_id, request_iterator, taken), self._answer(taken, context)
            )

    async def _receive(
        self, member_id: MemberId, requests: AsyncIterator[pb.StreamRolloutsRequest], taken: _Taken
    ) -> None:
        async for request in requests:
            for start in range(0, len(request.items), _TOGETHER_COUNT):
                acks = self._take(member_id, request.items[start : start + _TOGETHER_COUNT])
                await taken.put((self._hub.commits.ticket, acks))
                # Other members have their turn.
                await asyncio.sleep(0)
        await taken.put(None)

    async def _answer(self, taken: _Taken, context: Context) -> None:
        while (answer := await taken.get()) is not None:
            ticket, acks = answer
            await self._hub.safe(ticket)
            hit(FaultPoint.ROLLOUTS_SAFE)
            await context.write(pb.StreamRolloutsResponse(acks=map(wire.encode_item_ack, acks)))

    def _take(self, member_id: MemberId, items: Sequence[pb.RolloutItem]) -> list[ItemAck]:
        """Hand items over together; an item that is not sound costs only itself."""
        read = [_read(member_id, item) for item in items]
        answers = iter(apply_all(self._hub, [each for each in read if isinstance(each, tuple)]))
        return [next(answers) if isinstance(each, tuple) else each for each in read]


def _read(member_id: MemberId, item: pb.RolloutItem) -> Arrival | ItemAck:
    """Return what an item says, or why it is refused."""
    is_rollout = item.WhichOneof("item") == "rollout"
    try:
        if is_rollout:
            sample = rollout.decode_rollout(item.rollout)
            return RolloutArrived(member_id=member_id, rollout=sample), item.rollout
        result = rollout.decode_task_result(item.result)
        return TaskFinished(member_id=member_id, result=result), None
    except AstraflowError as error:
        if error.reason not in (Reason.INVALID_FIELD, Reason.ROLLOUT_INVALID):
            raise
        return ItemAck(
            item_id=item.rollout.rollout_id if is_rollout else item.result.task_id,
            disposition=Disposition.REJECTED,
            reason=error.reason,
            message=error.message,
        )


def _steering(member_id: MemberId, request: pb.StreamTasksRequest) -> CreditGiven | TaskNacked:
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
    return CreditGiven(
        member_id=member_id,
        max_outstanding=credit.max_outstanding,
        max_eval_outstanding=credit.max_eval_outstanding,
        max_eval_extra=credit.max_eval_extra,
    )


def _task_event(item: TaskItem) -> pb.StreamTasksResponse:
    if isinstance(item, RolloutTask):
        return pb.StreamTasksResponse(task=tasks.encode_rollout_task(item))
    if isinstance(item, Directive):
        return pb.StreamTasksResponse(directive=common.encode_directive(item))
    return pb.StreamTasksResponse(cancellation=wire.encode_task_cancellation(item))
