"""Swapping: one version of a server's weights after the other."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import httpx
import structlog

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import KvPolicy
from astraflow.core.tensors import SwapReport, WeightUpdate
from astraflow.engines.checks import apply_failed
from astraflow.engines.served.dialect import Dialect
from astraflow.engines.served.exchange import ExchangeFolder
from astraflow.engines.served.expert_tensors import apart
from astraflow.engines.served.holds import Holds
from astraflow.engines.served.meter import Meter
from astraflow.engines.served.model import Model
from astraflow.engines.served.server import Server

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

Source = Callable[[], WeightUpdate]


class Swapping:
    """Makes versions live, one at a time.

    Attributes:
        version: What is live; None: no weights of the run.
        holds: What keeps it live.
        source: Returns all weights, for a server that was started again; None: nobody has them.
    """

    def __init__(
        self,
        dialect: Dialect,
        *,
        model: Model,
        server: Server,
        meter: Meter,
        folder: ExchangeFolder,
        kv: KvPolicy,
    ) -> None:
        self.version: int | None = None
        self.holds = Holds(lambda: self.version)
        self.source: Source | None = None
        self._dialect = dialect
        self._model = model
        self._server = server
        self._meter = meter
        self._folder = folder
        self._kv = kv
        self._one_at_a_time = asyncio.Lock()

    async def swap(self, update: WeightUpdate) -> SwapReport:
        """Make a version live once the live one is not held; see `Engine.swap`."""
        async with self._one_at_a_time:
            http = await self._server.wait_up()
            update = await asyncio.to_thread(apart, update, self._model.shapes)
            await asyncio.to_thread(self._model.check, update, self.version)
            async with self._folder.file(update) as file:
                await self._staged(http, file)
                async with self.holds.changing():
                    return await self._changed(http, file, update.version)

    async def restore(self) -> None:
        """Load all weights into a server that was started again, unless somebody did."""
        try:
            await self._restore()
        except AstraflowError as error:
            # The next start, or the next version, tries again.
            log.warning("weights not restored", why=error.message)

    async def _restore(self) -> None:
        async with self._one_at_a_time:
            if self.source is None or self.version is not None:
                return
            http = await self._server.wait_up()
            update = apart(await asyncio.to_thread(self.source), self._model.shapes)
            async with self._folder.file(update) as file:
                await self._staged(http, file)
                async with self.holds.changing(at_once=True):
                    await self._changed(http, file, update.version)
        log.info("weights restored", version=update.version)

    async def _staged(self, http: httpx.AsyncClient, file: Path) -> None:
        try:
            await self._dialect.stage(http, file)
        except httpx.HTTPError as error:
            self._server.condemn(f"it did not stage an update: {error!r}")
            raise apply_failed(f"the server is lost: {error!r}") from error

    async def _changed(self, http: httpx.AsyncClient, file: Path, version: int) -> SwapReport:
        """Change the weights in a pause; the server ends when anything in it goes wrong."""
        started, inflight_count = perf_counter(), self._meter.running_count
        try:
            await self._dialect.change(http, file, version=version, kv=self._kv)
        except (AstraflowError, httpx.HTTPError) as error:
            self._server.condemn(f"version {version} was not applied whole: {error}")
            raise AstraflowError(
                Reason.APPLY_FAILED,
                f"version {version} was not applied whole, so the server starts again: {error}",
            ) from error
        pause_s = perf_counter() - started
        self.version = version
        return SwapReport(version=version, pause_s=pause_s, inflight_count=inflight_count)
