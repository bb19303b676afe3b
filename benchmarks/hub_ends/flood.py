"""A node that ignores its credit and sends for ever, and a trainer that stands still."""

import asyncio
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from astraflow.core.errors import AstraflowError
from astraflow.rpc.auth import bearer
from astraflow.rpc.channel import dial
from astraflow_proto.control.v1 import ledger_service_pb2
from astraflow_proto.control.v1.ledger_service_pb2_grpc import LedgerServiceStub
from astraflow_proto.dataflow.v1 import raas_service_pb2 as raas_pb
from hub_ends.members import Members
from hub_ends.process import GROUP_SIZE, TOKEN, HubProcess
from hub_ends.throughput import ITEM_COUNT, Row

_LOOK_EVERY_S: Final = 0.25
_MOST_DRAIN_S: Final = 60.0
# Of the hub: lots of one stream whose acks wait, bytes of tokens that can be listed, and how many
# times `compact_nbytes` the journal takes where the snapshot has to wait for a core.
_UNACKED_LOT_COUNT: Final = 32
_LISTED_NBYTES: Final = 16 << 20
_MOST_TIMES: Final = 8
_NBYTES_PER_TOKEN: Final = 9


@dataclass
class Flood:
    """What is sent, and what the hub says to it.

    Attributes:
        items: All that was ever asked for, answered: sent again and again.
        accepted: Rollouts that the hub accepted.
        trained: Rollouts in batches that were settled.
        answers: How often the hub said what.
        fresh: Wakes the sender for new tasks.
    """

    members: Members
    items: list[raas_pb.RolloutItem] = field(default_factory=list[raas_pb.RolloutItem])
    accepted: set[str] = field(default_factory=set[str])
    trained: set[str] = field(default_factory=set[str])
    answers: Counter[int] = field(default_factory=Counter[int])
    is_over: bool = False

    async def take_tasks(self) -> None:
        """Answer every task at once."""
        async for message in await self.members.open_tasks():
            if message.HasField("task") and not self.is_over:
                self.items += self.members.answers(message.task)

    async def send(self) -> None:
        """Send all of it, and all of it again, until it is over."""
        stream = self.members.open_rollouts()

        async def read() -> None:
            async for message in stream:
                for ack in message.acks:
                    self.answers[ack.disposition] += 1
                    if ack.disposition == raas_pb.DISPOSITION_ACCEPTED and "/" in ack.item_id:
                        self.accepted.add(ack.item_id)

        reading = asyncio.create_task(read())
        place = 0
        while not self.is_over:
            lot = self.items[place : place + ITEM_COUNT]
            place = place + len(lot) if lot else 0
            if lot:
                await stream.write(raas_pb.StreamRolloutsRequest(items=lot))
            else:
                await asyncio.sleep(0)
        await stream.done_writing()
        await reading

    async def train(self, batches: Any) -> None:
        """Settle batches until every accepted rollout was in one."""
        header: Any = None
        rows: list[str] = []
        while not self.accepted <= self.trained:
            message = await batches.read()
            if message.HasField("header"):
                header, rows = message.header, []
            elif message.HasField("part"):
                rows += message.part.rollout_ids
                if len(rows) == header.row_count:
                    self.trained.update(rows)
                    await self.members.settle(header.batch_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What the recipe lets a hub take.

    Attributes:
        open_group_count: Groups that may be open: (max_staleness + 1) batches of them.
        token_count: Of each rollout.
        compact_nbytes: Bytes of records after which a snapshot takes their place.
    """

    open_group_count: int
    token_count: int
    compact_nbytes: int

    @property
    def rollout_nbytes(self) -> int:
        """Rollouts that may be there at once, and lots whose acks wait for the journal."""
        lots = _UNACKED_LOT_COUNT * ITEM_COUNT
        kept = self.open_group_count * GROUP_SIZE + lots
        return kept * self.token_count * _NBYTES_PER_TOKEN + _LISTED_NBYTES

    def rss_nbytes(self, before: int) -> int:
        """Of the hub that had so many before: objects around tokens may take as much as these."""
        return before + 2 * self.rollout_nbytes

    @property
    def journal_nbytes(self) -> int:
        """Of the journal's folder, where the snapshot has to wait for a core."""
        return _MOST_TIMES * self.compact_nbytes


async def measure_flood(hub: HubProcess, *, seconds: float, bounds: Bounds) -> Row:
    """Return what a flood did to memory and journal, and whether anything was lost."""
    rss = hub.rss_nbytes
    async with dial(hub.address) as channel:
        members = Members(channel, bounds.token_count)
        await members.join()
        batches = members.open_batches(2)
        flood = Flood(members)
        looks: list[tuple[float, int, int]] = []
        async with asyncio.TaskGroup() as group:
            kept = [group.create_task(each) for each in (flood.take_tasks(), members.keep_alive())]
            sending = group.create_task(flood.send())
            before = hub.written_nbytes
            started = time.monotonic()
            while (now := time.monotonic() - started) < seconds:
                looks.append((now, hub.rss_nbytes, hub.journal_nbytes))
                await asyncio.sleep(_LOOK_EVERY_S)
            written = hub.written_nbytes - before
            flood.is_over = True
            await sending
            with suppress(TimeoutError):
                async with asyncio.timeout(_MOST_DRAIN_S):
                    await flood.train(batches)
            (account,) = (
                await LedgerServiceStub(channel).GetLedger(
                    ledger_service_pb2.GetLedgerRequest(), metadata=bearer(TOKEN)
                )
            ).accounts
            for each in kept:
                each.cancel()
        with suppress(AstraflowError):
            batches.cancel()
    row = _row(flood, looks, account, seconds=seconds, written_nbytes=written)
    most = {"rss": bounds.rss_nbytes(rss), "journal": bounds.journal_nbytes}
    return row | {
        "open_groups_bound": bounds.open_group_count,
        **{f"{name}_bound_mb": nbytes / 1e6 for name, nbytes in most.items()},
        "is_bounded": len(flood.accepted) <= bounds.open_group_count * GROUP_SIZE
        and all(row[f"{name}_peak_mb"] * 1e6 <= nbytes for name, nbytes in most.items()),
    }


def _row(
    flood: Flood,
    looks: list[tuple[float, int, int]],
    account: Any,
    *,
    seconds: float,
    written_nbytes: int,
) -> Row:
    half = [look for look in looks if look[0] >= seconds / 2]
    return {
        "seconds": seconds,
        "sent_per_s": flood.answers.total() / seconds,
        "accepted": len(flood.accepted),
        "trained": account.trained_count,
        "lost": len(flood.accepted - flood.trained),
        "rss_peak_mb": max(rss for _, rss, _ in looks) / 1e6,
        "rss_growth_in_second_half_mb": (half[-1][1] - half[0][1]) / 1e6,
        "journal_peak_mb": max(nbytes for _, _, nbytes in looks) / 1e6,
        "journal_end_mb": looks[-1][2] / 1e6,
        "disk_mb_per_s": written_nbytes / seconds / 1e6,
        "open_groups": len(flood.accepted) / GROUP_SIZE,
    }
