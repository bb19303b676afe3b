"""Stream outboxes: what waits for the streams of each member."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeAlias

from astraflow.core.batches import EndOfData
from astraflow.core.effects import (
    SendBatch,
    SendCancellation,
    SendDirective,
    SendEndOfData,
    SendPublishOrder,
    SendSaveOrder,
    SendScrubOrder,
    SendTask,
)
from astraflow.core.ids import MemberId
from astraflow.core.members import Directive
from astraflow.core.status import WaitReason
from astraflow.core.tasks import RolloutTask, TaskCancellation
from astraflow.rpc.concurrency import Outbox

TaskItem: TypeAlias = RolloutTask | TaskCancellation | Directive

Order: TypeAlias = SendPublishOrder | SendScrubOrder | SendSaveOrder

BatchItem: TypeAlias = SendBatch | EndOfData | Directive | WaitReason | Order

StreamEffect: TypeAlias = (
    SendTask | SendCancellation | SendDirective | SendBatch | SendEndOfData | Order
)


class StreamOutboxes:
    """Sorts what the run sends into outboxes.

    The tasks of a RaaS wait for its stream, also while it has none. A batch goes to the stream
    of its rank; without one it is let go, because the run sends it again on the next.
    """

    def __init__(self) -> None:
        self._tasks: dict[MemberId, Outbox[TaskItem]] = {}
        self._batches: dict[MemberId, dict[int, Outbox[BatchItem]]] = {}

    def tasks(self, member_id: MemberId) -> Outbox[TaskItem]:
        """Return what waits for the task stream of a RaaS."""
        return self._tasks.setdefault(member_id, Outbox())

    def open_batches(self, member_id: MemberId, rank: int) -> Outbox[BatchItem]:
        """Return a fresh outbox for the stream of a rank; the one before gets nothing more."""
        outbox: Outbox[BatchItem] = Outbox()
        self._batches.setdefault(member_id, {})[rank] = outbox
        return outbox

    def batches(self, member_id: MemberId, rank: int) -> Outbox[BatchItem]:
        """Return what waits for the stream of a rank."""
        outbox = self._batches.get(member_id, {}).get(rank)
        return self.open_batches(member_id, rank) if outbox is None else outbox

    def clear(self, member_id: MemberId) -> None:
        """Forget what the streams of a member have not taken."""
        for outbox in (self.tasks(member_id), *self._batches.get(member_id, {}).values()):
            outbox.clear()

    def drop(self, member_id: MemberId) -> None:
        self._tasks.pop(member_id, None)
        self._batches.pop(member_id, None)

    def post(self, effect: StreamEffect) -> None:
        """Put one effect where its stream finds it."""
        match effect:
            case SendTask():
                self.tasks(effect.member_id).put(effect.task)
            case SendCancellation():
                cancellation = TaskCancellation(
                    task_id=effect.task_id,
                    reason=effect.reason,
                    sample_indexes=effect.sample_indexes,
                )
                self.tasks(effect.member_id).put(cancellation)
            case SendDirective():
                if effect.member_id in self._batches:
                    self._post_batch(effect.member_id, 0, effect.directive)
                else:
                    self.tasks(effect.member_id).put(effect.directive)
            case SendBatch():
                self._post_batch(effect.member_id, effect.rank, effect)
            case SendEndOfData():
                self._post_batch(effect.member_id, effect.rank, effect.end_of_data)
            case SendPublishOrder() | SendScrubOrder() | SendSaveOrder():
                self._post_batch(effect.member_id, 0, effect)

    def _post_batch(self, member_id: MemberId, rank: int, item: BatchItem) -> None:
        outbox = self._batches.get(member_id, {}).get(rank)
        if outbox is not None:
            outbox.put(item)
            if isinstance(item, EndOfData):
                outbox.close()


INTERVAL_S = 3.0


async def explain_waits(
    outbox: Outbox[BatchItem],
    explain: Callable[[], Awaitable[Iterable[WaitReason]]],
    *,
    interval_s: float,
) -> None:
    """Put an explanation into an outbox whenever nothing came for a while, for ever.

    A peer that has not read the last one gets no other: they would pile up.
    """
    while True:
        before = outbox.put_count
        await asyncio.sleep(interval_s)
        if outbox.put_count == before and not len(outbox):
            reasons = await explain()
            if outbox.put_count == before:
                for reason in reasons:
                    outbox.put(reason)
