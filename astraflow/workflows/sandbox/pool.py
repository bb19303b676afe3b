"""Sandboxes that are ready before they are needed; each is used once."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

from astraflow.workflows.sandbox.protocol import Sandbox, SandboxProvider


class SandboxPool:
    """Hands out fresh sandboxes: nothing of one program is there for the next.

    A sandbox that nobody used yet is started while others are in use, so that a program waits for
    none as long as programs do not come faster than the machine starts sandboxes. They end with the
    event loop, where nobody closes the pool.
    """

    def __init__(self, provider: SandboxProvider, *, workers: int, ready: int) -> None:
        """Start nothing before one is taken: `workers` are in use at once, `ready` ahead."""
        self._provider = provider
        self._workers = workers
        self._ready = ready
        self._begin()

    @asynccontextmanager
    async def take(self) -> AsyncGenerator[Sandbox]:
        """Lend a sandbox, and end it afterwards.

        Raises:
            AstraflowError: ENVIRONMENT_FAILED when none starts here.
        """
        if self._loop is not asyncio.get_running_loop():
            # Those of another loop, which has ended, end with their descriptors.
            self._begin()
        if self._closer is None:
            self._closer = asyncio.get_running_loop().create_task(self._close_with_loop())
        async with self._room:
            starting = self._started.popleft() if self._started else self._start()
            while len(self._started) < self._ready:
                self._started.append(self._start())
            try:
                # Withdrawn or not, what was begun is had, so that it can be ended.
                yield await asyncio.shield(starting)
            finally:
                closing = asyncio.get_running_loop().create_task(_end(starting))
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """End all of them; idempotent."""
        closer, self._closer = self._closer, None
        if closer is not None and self._loop is asyncio.get_running_loop():
            closer.cancel()
            await asyncio.wait({closer})

    async def _close_with_loop(self) -> None:
        """Wait to be cancelled, as all tasks of a loop that ends are; then end what is ready."""
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            # Whoever takes one meanwhile has another one started.
            while self._started:
                with suppress(Exception, asyncio.CancelledError):
                    await _end(self._started.popleft())
            for closing in tuple(self._closing):
                with suppress(Exception, asyncio.CancelledError):
                    await closing
            await self._provider.close()

    def _begin(self) -> None:
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None
        self._closer: asyncio.Task[None] | None = None
        self._room = asyncio.Semaphore(self._workers)
        self._started = deque[asyncio.Task[Sandbox]]()
        self._closing = set[asyncio.Task[None]]()

    def _start(self) -> asyncio.Task[Sandbox]:
        return asyncio.get_running_loop().create_task(self._provider.start())


async def _end(starting: asyncio.Task[Sandbox]) -> None:
    """Close a sandbox once it has started; one that did not has nothing to close."""
    await asyncio.wait({starting})
    if not starting.cancelled() and starting.exception() is None:
        await starting.result().close()
