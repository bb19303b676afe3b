"""Meters: how busy a server is, by what it says and by what was asked of it."""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager, suppress
from time import perf_counter

import httpx

from astraflow.core.errors import AstraflowError
from astraflow.engines.protocol import EngineLoad
from astraflow.engines.served.dialect import Dialect, ServerLoad
from astraflow.engines.served.server import Server

_ASK_EVERY_S = 1.0


class Meter:
    """Counts requests and tokens here, and asks the server for what only it knows."""

    def __init__(self) -> None:
        self.running_count = 0
        self._sampled_count = 0
        self._busy_s = 0.0
        self._busy_since = 0.0
        self._said = ServerLoad(running_count=0, queued_count=0, kv_fraction=0.0)

    @contextmanager
    def running(self) -> Generator[None]:
        """Count a request during the body."""
        if not self.running_count:
            self._busy_since = perf_counter()
        self.running_count += 1
        try:
            yield
        finally:
            self.running_count -= 1
            if not self.running_count:
                self._busy_s += perf_counter() - self._busy_since

    def note_sampled(self, count: int) -> None:
        """Count tokens."""
        self._sampled_count += count

    @property
    def progress(self) -> tuple[int, int]:
        """What rises as long as tokens come, here or, by its own word, in the server."""
        return self._sampled_count, self._said.sampled_count

    def load(self) -> EngineLoad:
        """Return the load; what the server said is up to a second old, and nothing when idle."""
        running = self.running_count
        queued = min(self._said.queued_count, running)
        return EngineLoad(
            running_count=running - queued,
            queued_count=queued,
            sampled_token_count=self._sampled_count,
            kv_fraction=self._said.kv_fraction if running else 0.0,
            busy_s=self._busy_s + (perf_counter() - self._busy_since if running else 0.0),
        )

    async def follow(self, server: Server, dialect: Dialect) -> None:
        """Ask the server again and again while something runs, until cancelled."""
        while True:
            if self.running_count:
                with suppress(AstraflowError, httpx.HTTPError):
                    self._said = await dialect.load(server.http)
            await asyncio.sleep(_ASK_EVERY_S)
