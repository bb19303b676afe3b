"""Pools of sandboxes, over a provider whose starts end when a test says so."""

import asyncio

from astraflow.workflows.sandbox.pool import SandboxPool


class Slow:
    """Counts its sandboxes; each starts once it may."""

    def __init__(self):
        self.may_start = asyncio.Event()
        self.is_closed = asyncio.Event()
        self.open_count = 0

    async def start(self):
        await self.may_start.wait()
        self.open_count += 1
        return self

    async def close(self):
        self.open_count = max(0, self.open_count - 1)
        self.is_closed.set()


async def test_a_sandbox_that_starts_as_its_taker_is_withdrawn_is_closed():
    provider = Slow()
    pool = SandboxPool(provider, workers=1, ready=0)

    async def take():
        async with pool.take():
            raise AssertionError

    taking = asyncio.ensure_future(take())
    while not provider.may_start._waiters:  # noqa: ASYNC110 - the other task makes it true
        await asyncio.sleep(0)
    provider.may_start.set()
    while not provider.open_count:  # noqa: ASYNC110 - as before
        await asyncio.sleep(0)
    taking.cancel()
    await asyncio.wait({taking})
    assert taking.cancelled()
    await provider.is_closed.wait()
    assert provider.open_count == 0
    await pool.close()
