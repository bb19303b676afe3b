"""Tasks on their way to a RaaS, with credit on their way back."""

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from astraflow.client.duplex import Outbox, converse
from astraflow.client.patience import Patience
from astraflow.client.session import SessionKeeper
from astraflow.core.errors import AstraflowError, Failure
from astraflow.core.ids import TaskId
from astraflow.core.tasks import RolloutTask, TaskCancellation, TaskCredit
from astraflow.wire.common import decode_directive, encode_failure
from astraflow.wire.raas import decode_task_cancellation, encode_task_credit
from astraflow.wire.tasks import decode_rollout_task
from astraflow_proto.dataflow.v1 import raas_service_pb2 as pb
from astraflow_proto.dataflow.v1.raas_service_pb2_grpc import RaasServiceStub
from astraflow_proto.rollout.v1 import task_pb2

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSink:
    """Who takes what the stream brings; the calls must not block."""

    task: Callable[[RolloutTask], None]
    cancellation: Callable[[TaskCancellation], None]


class TaskStream:
    """StreamTasks, opened again after every cut.

    Tasks and nacks that a cut swallowed are found when the session is opened again: what the
    run holds to be here and is not is sent again.
    """

    def __init__(self, keeper: SessionKeeper, *, credit: TaskCredit, sink: TaskSink) -> None:
        self._keeper = keeper
        self._stub = RaasServiceStub(keeper.hub.channel)
        self._sink = sink
        self._credit = credit
        self._outbox: Outbox[pb.StreamTasksRequest] = Outbox()

    def set_credit(self, credit: TaskCredit) -> None:
        """Bound the work from now on; less than what is out cancels nothing."""
        if credit != self._credit:
            self._credit = credit
            self._outbox.put(pb.StreamTasksRequest(credit=encode_task_credit(credit)))

    def nack(self, task_id: TaskId, failure: Failure) -> None:
        """Give a task back unstarted."""
        nack = pb.TaskNack(task_id=task_id, failure=encode_failure(failure))
        self._outbox.put(pb.StreamTasksRequest(nack=nack))

    async def run(self) -> None:
        """Follow the stream until cancelled.

        Raises:
            AstraflowError: What the hub answered; NOT_READY when it could not be reached.
        """
        await self._keeper.stay(self._follow, reconciles=True)

    async def _follow(self, patience: Patience) -> bool:
        opening = pb.TaskOpen(credit=encode_task_credit(self._credit))
        self._outbox.reset([pb.StreamTasksRequest(open=opening)])

        def take(event: pb.StreamTasksResponse) -> None:
            patience.renew()
            self._dispatch(event)

        call = self._stub.StreamTasks(None, metadata=self._keeper.metadata)
        await converse(call, self._outbox, take, pack=iter)
        return False

    def _take(self, message: task_pb2.RolloutTask) -> None:
        """Hand a task over, or give it back when this node cannot read it."""
        try:
            task = decode_rollout_task(message)
        except AstraflowError as error:
            log.error("unreadable task", task_id=message.task_id, why=error.message)  # noqa: TRY400
            self.nack(TaskId(message.task_id), error.to_failure())
        else:
            self._sink.task(task)

    def _dispatch(self, event: pb.StreamTasksResponse) -> None:
        match event.WhichOneof("event"):
            case "task":
                self._take(event.task)
            case "cancellation":
                self._sink.cancellation(decode_task_cancellation(event.cancellation))
            case "directive":
                self._keeper.direct(decode_directive(event.directive))
            case _:
                log.warning("unknown event on the task stream; is the hub newer than this node?")
