"""Waits: a trainer that gets nothing is told why."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from astraflow.core.status import WaitReason
from astraflow.dataflow.mailroom import BatchItem
from astraflow.rpc.outbox import Outbox

INTERVAL_S = 3.0


async def tell_waits(
    outbox: Outbox[BatchItem],
    explain: Callable[[], Awaitable[Iterable[WaitReason]]],
    *,
    interval_s: float,
) -> None:
    """Put an explanation into an outbox whenever nothing came for a while, for ever."""
    while True:
        before = outbox.put_count
        await asyncio.sleep(interval_s)
        if outbox.put_count == before:
            reasons = await explain()
            if outbox.put_count == before:
                for reason in reasons:
                    outbox.put(reason)
