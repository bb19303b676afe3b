"""The mailroom: what waits for the streams of each member."""

from typing import TypeAlias

from astraflow.core.batches import EndOfData
from astraflow.core.effects import (
    SendBatch,
    SendCancellation,
    SendDirective,
    SendDoubt,
    SendEndOfData,
    SendPublishOrder,
    SendSaveOrder,
    SendTask,
)
from astraflow.core.ids import MemberId
from astraflow.core.members import Directive
from astraflow.core.status import WaitReason
from astraflow.core.tasks import RolloutTask, TaskCancellation
from astraflow.rpc.outbox import Outbox

TaskItem: TypeAlias = RolloutTask | TaskCancellation | Directive
Order: TypeAlias = SendPublishOrder | SendDoubt | SendSaveOrder
BatchItem: TypeAlias = SendBatch | EndOfData | Directive | WaitReason | Order

Mail: TypeAlias = SendTask | SendCancellation | SendDirective | SendBatch | SendEndOfData | Order


class Mailroom:
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
        """Forget a member."""
        self._tasks.pop(member_id, None)
        self._batches.pop(member_id, None)

    def post(self, mail: Mail) -> None:
        """Put one effect where its stream finds it."""
        match mail:
            case SendTask():
                self.tasks(mail.member_id).put(mail.task)
            case SendCancellation():
                cancellation = TaskCancellation(
                    task_id=mail.task_id,
                    reason=mail.reason,
                    sample_indexes=mail.sample_indexes,
                )
                self.tasks(mail.member_id).put(cancellation)
            case SendDirective():
                self._post_directive(mail)
            case SendBatch():
                self._post_batch(mail.member_id, mail.rank, mail)
            case SendEndOfData():
                self._post_batch(mail.member_id, mail.rank, mail.end_of_data)
            case SendPublishOrder() | SendDoubt() | SendSaveOrder():
                self._post_batch(mail.member_id, 0, mail)

    def _post_directive(self, mail: SendDirective) -> None:
        if mail.member_id in self._batches:
            self._post_batch(mail.member_id, 0, mail.directive)
        else:
            self.tasks(mail.member_id).put(mail.directive)

    def _post_batch(self, member_id: MemberId, rank: int, item: BatchItem) -> None:
        outbox = self._batches.get(member_id, {}).get(rank)
        if outbox is not None:
            outbox.put(item)
            if isinstance(item, EndOfData):
                outbox.close()
