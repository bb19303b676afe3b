"""Rollouts and task results on their way to the run, kept until they are acknowledged."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence

import structlog

from astraflow.client.duplex import Outbox, converse
from astraflow.client.patience import Patience
from astraflow.client.session import SessionKeeper
from astraflow.core.ids import TaskId
from astraflow.core.rollouts import Disposition, ItemAck, Rollout, TaskResult
from astraflow.wire.raas import decode_item_ack
from astraflow.wire.rollout import encode_rollout, encode_task_result
from astraflow_proto.dataflow.v1 import raas_service_pb2 as pb
from astraflow_proto.dataflow.v1.raas_service_pb2_grpc import RaasServiceStub

# A message takes what is ready up to here, and always one item. The run works through a message
# without a pause, so it must not be long.
_MESSAGE_ITEM_COUNT = 64
_MESSAGE_NBYTES = 1 << 20
# Messages cost both ends more than rollouts do: those that end one soon after another share one.
_PAUSE_S = 0.005
# What a message adds to a single item.
_FRAME_NBYTES = 64

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class RolloutStream:
    """StreamRollouts, opened again after every cut; what was not acknowledged is sent again.

    Attributes:
        dispositions: How often the run did what with an item.
    """

    def __init__(self, keeper: SessionKeeper) -> None:
        self._keeper = keeper
        self._stub = RaasServiceStub(keeper.hub.channel)
        self._unacked: dict[str, pb.RolloutItem] = {}
        self._results: set[TaskId] = set()
        self._outbox: Outbox[pb.RolloutItem] = Outbox()
        self._flushed = asyncio.Event()
        self._flushed.set()
        self.dispositions: Counter[Disposition] = Counter()

    @property
    def unacked_results(self) -> frozenset[TaskId]:
        """Tasks whose result the run has not acknowledged: they are still held."""
        return frozenset(self._results)

    def send(self, rollout: Rollout) -> bool:
        """Send a rollout; return False, and send nothing, when it is larger than the run reads."""
        item = pb.RolloutItem(rollout=encode_rollout(rollout))
        if item.ByteSize() > self._keeper.session.max_message_nbytes - _FRAME_NBYTES:
            return False
        self._put(rollout.rollout_id, item)
        return True

    def close_task(self, result: TaskResult) -> None:
        """Send the result of a task, after its rollouts."""
        self._results.add(result.task_id)
        self._put(result.task_id, pb.RolloutItem(result=encode_task_result(result)))

    async def flush(self) -> None:
        """Wait until everything that was sent is acknowledged."""
        await self._flushed.wait()

    async def run(self) -> None:
        """Follow the stream until cancelled.

        Raises:
            AstraflowError: What the hub answered; NOT_READY when it could not be reached.
        """
        await self._keeper.stay(self._follow)

    def _put(self, item_id: str, item: pb.RolloutItem) -> None:
        self._unacked[item_id] = item
        self._flushed.clear()
        self._outbox.put(item)

    async def _follow(self, patience: Patience) -> bool:
        self._outbox.reset(self._unacked.values())

        def take(answer: pb.StreamRolloutsResponse) -> None:
            patience.renew()
            for ack in map(decode_item_ack, answer.acks):
                self._acknowledge(ack)

        call = self._stub.StreamRollouts(None, metadata=self._keeper.metadata)
        await converse(call, self._outbox, take, pack=_packed, pause_s=_PAUSE_S)
        return False

    def _acknowledge(self, ack: ItemAck) -> None:
        if self._unacked.pop(ack.item_id, None) is None:
            return
        self._results.discard(TaskId(ack.item_id))
        self.dispositions[ack.disposition] += 1
        if ack.disposition is Disposition.REJECTED:
            log.error("the run refused it", item=ack.item_id, reason=ack.reason, why=ack.message)
        if not self._unacked:
            self._flushed.set()


def _packed(items: Sequence[pb.RolloutItem]) -> Iterator[pb.StreamRolloutsRequest]:
    """Put items into as few messages as their limits allow, in order."""
    message, nbytes = pb.StreamRolloutsRequest(), 0
    for item in items:
        nbytes += item.ByteSize()
        is_full = len(message.items) == _MESSAGE_ITEM_COUNT or nbytes > _MESSAGE_NBYTES
        if message.items and is_full:
            yield message
            message, nbytes = pb.StreamRolloutsRequest(), item.ByteSize()
        message.items.append(item)
    yield message
