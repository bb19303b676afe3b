"""Ingest: what nodes send, decided together whichever stream it came on.

Many nodes send a rollout or two per message. What the event loop has read of all streams when it
comes to decide is one batch: the run looks at what follows from it once, the journal writes it in
one go, and each stream gets its acks in one message.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import datetime
from functools import partial
from typing import Final, TypeAlias

from google.protobuf.message import DecodeError

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.events import RolloutArrived, TaskFinished, Ticked
from astraflow.core.ids import MemberId
from astraflow.core.rollouts import Disposition, ItemAck
from astraflow.dataflow.commits import UNSAFE_COUNT
from astraflow.dataflow.hub import Hub
from astraflow.rpc.concurrency import together
from astraflow.storage.fault_points import FaultPoint, hit
from astraflow.wire import rollout
from astraflow_proto.rollout.v1 import rollout_pb2

# Deciding so many items needs a few ms of the event loop.
_BATCH_COUNT: Final = 64
# Items that wait to be decided; then nothing more is read, but for the message at hand.
_INBOX_COUNT: Final = 4 * _BATCH_COUNT
# Items of one stream whose acks wait for the journal; then the peer waits.
_UNACKED_COUNT: Final = 32 * _BATCH_COUNT

# What an item says with the rollout as it came, or why it is refused.
_Item: TypeAlias = tuple[RolloutArrived | TaskFinished, bytes | None] | ItemAck
_Write: TypeAlias = Callable[[Sequence[ItemAck]], Awaitable[None]]


class _Stream:
    """One node's stream of rollouts.

    Attributes:
        unacked_count: Items that have no ack yet.
        acks: That are safe and not sent yet.
        error: Ends the stream.
        is_read: Whether the peer has sent everything.
        changed: Set when any of these did.
    """

    def __init__(self) -> None:
        self.unacked_count = 0
        self.acks: list[ItemAck] = []
        self.error: Exception | None = None
        self.is_read = False
        self.changed = asyncio.Event()
        self.has_room = asyncio.Event()
        self.has_room.set()

    def add(self, acks: Sequence[ItemAck]) -> None:
        self.acks += acks
        self.changed.set()

    def fail(self, error: Exception) -> None:
        self.error = self.error or error
        self.changed.set()


class Ingest:
    """Takes the rollouts and task results of all streams of a hub."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._inbox = deque[tuple[_Stream, _Item]]()
        self._is_due = False
        self._may_read = asyncio.Event()
        self._may_read.set()

    async def serve(
        self, member_id: MemberId, requests: AsyncIterator[bytes], write: _Write
    ) -> None:
        """Take what a node sends until it has sent everything, and acknowledge what is safe.

        Raises:
            AstraflowError: SESSION_ENDED.
        """
        stream = _Stream()
        await together(self._receive(stream, member_id, requests), _answer(stream, write))

    async def _receive(
        self,
        stream: _Stream,
        member_id: MemberId,
        requests: AsyncIterator[bytes],
    ) -> None:
        async for request in requests:
            items = rollout.read_items(request)
            for start in range(0, len(items), _BATCH_COUNT):
                for is_rollout, data in items[start : start + _BATCH_COUNT]:
                    item = _read(member_id, data, is_rollout=is_rollout)
                    self._inbox.append((stream, item))
                    stream.unacked_count += 1
                self._decide_soon()
                if stream.unacked_count >= _UNACKED_COUNT:
                    stream.has_room.clear()
                    await stream.has_room.wait()
                elif not self._may_read.is_set():
                    await self._may_read.wait()
                elif start + _BATCH_COUNT < len(items):
                    # Other members have their turn.
                    await asyncio.sleep(0)
        stream.is_read = True
        stream.changed.set()

    def _decide_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._decide)
        if len(self._inbox) >= _INBOX_COUNT:
            self._may_read.clear()

    def _decide(self) -> None:
        """Decide what comes of the next items, and have them acknowledged once they are safe."""
        self._is_due = False
        commits = self._hub.commits
        if commits.unsafe_count >= UNSAFE_COUNT:
            self._is_due = True
            commits.then(commits.ticket - _BATCH_COUNT, self._decide)
            return
        inbox = self._inbox
        batch = [inbox.popleft() for _ in range(min(len(inbox), _BATCH_COUNT))]
        if inbox:
            self._decide_soon()
        if len(inbox) < _INBOX_COUNT:
            self._may_read.set()
        acks: dict[_Stream, list[ItemAck]] = {}
        is_open, now = False, self._hub.now()
        for left, (stream, item) in zip(range(len(batch) - 1, -1, -1), batch, strict=True):
            try:
                ack, is_decided = self._apply(item, now, goes_on=left > 0)
            except Exception as error:  # noqa: BLE001 - ends the stream that it came on
                stream.fail(error)
                continue
            acks.setdefault(stream, []).append(ack)
            is_open = left > 0 if is_decided else is_open
        if is_open and not self._hub.is_broken:
            # Nothing came of the last one: what comes of those before it is decided now.
            self._hub.apply(Ticked())
        commits.then(commits.ticket, partial(self._acknowledge, acks, now))

    def _acknowledge(self, acks: dict[_Stream, list[ItemAck]], since: datetime) -> None:
        count = 0
        for stream, those in acks.items():
            stream.add(those)
            count += len(those)
        self._hub.counters.ack.observe((self._hub.now() - since).total_seconds(), count)

    def _apply(self, item: _Item, now: datetime, *, goes_on: bool) -> tuple[ItemAck, bool]:
        """Return the ack of an item, and whether anything was decided for it.

        A rollout that is of no use is not applied: so a node that sends the same ones for ever does
        not fill the journal with them.
        """
        if isinstance(item, ItemAck):
            return item, False
        event, received = item
        refusal = self._hub.run.refusal(event) if isinstance(event, RolloutArrived) else None
        if refusal is None:
            return self._hub.apply(event, received=received, goes_on=goes_on, now=now), True
        if refusal.event is not None:
            return self._hub.apply(refusal.event, goes_on=goes_on, now=now), True
        return refusal.ack, False


async def _answer(stream: _Stream, write: _Write) -> None:
    """Send acks as they come, until all is acknowledged that the peer has sent."""
    while not (stream.is_read and not stream.unacked_count):
        await stream.changed.wait()
        stream.changed.clear()
        if stream.acks:
            acks, stream.acks = stream.acks, []
            hit(FaultPoint.ROLLOUTS_SAFE)
            stream.unacked_count -= len(acks)
            if stream.unacked_count < _UNACKED_COUNT:
                stream.has_room.set()
            await write(acks)
        if stream.error is not None:
            raise stream.error


def _read(member_id: MemberId, data: bytes, *, is_rollout: bool) -> _Item:
    """Return what an item says, or why it is refused: one that is not sound costs only itself.

    Raises:
        AstraflowError: INVALID_FIELD when it cannot even be named.
    """
    try:
        if is_rollout:
            sample, received = rollout.read_rollout(data)
            return RolloutArrived(member_id=member_id, rollout=sample), received
        return TaskFinished(member_id=member_id, result=rollout.read_task_result(data)), None
    except AstraflowError as error:
        if error.reason not in (Reason.INVALID_FIELD, Reason.ROLLOUT_INVALID):
            raise
        try:
            item_id = (
                rollout_pb2.Rollout.FromString(data).rollout_id
                if is_rollout
                else rollout_pb2.TaskResult.FromString(data).task_id
            )
        except DecodeError:
            raise error from None
        return ItemAck(
            item_id=item_id,
            disposition=Disposition.REJECTED,
            reason=error.reason,
            message=error.message,
        )
