"""Hosts: one server, what it is handed and what is done beside it, begun and ended together."""

import asyncio
import os
import secrets
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import httpx

from astraflow.config.recipe import EngineSettings
from astraflow.core.errors import AstraflowError
from astraflow.core.rollouts import KvPolicy
from astraflow.engines.devices import Machine, visible_gpus
from astraflow.engines.served.dialect import AdapterLimits, Dialect, ServerCommand, ServerSetup
from astraflow.engines.served.exchange import ExchangeFolder
from astraflow.engines.served.model import ModelDescription
from astraflow.engines.served.server import InferenceServer

T = TypeVar("T")


class Background:
    """Holds tasks until they are done or the engine is closed."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Start a task; its errors are for who awaits it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    async def close(self) -> None:
        """Cancel what is not done, and wait for its end."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _end(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()


class ServerHost:
    """Keeps one server of a model running.

    Attributes:
        background: What is done beside it.
        folder: What it is handed.
        kv: What becomes of a cache when another version takes over.
        is_attached: Whether somebody else runs it.
    """

    def __init__(
        self,
        dialect: Dialect,
        *,
        model: ModelDescription,
        settings: EngineSettings,
        on_lost: Callable[[], None],
        is_changing: Callable[[], bool] = lambda: False,
        adapters: AdapterLimits | None = None,
    ) -> None:
        """Start the server, or attach to it; needs a running event loop.

        Raises:
            AstraflowError: INVALID_FIELD or CAPABILITY_MISSING for what no command line can say.
        """
        self.dialect = dialect
        self.model = model
        self._settings = settings
        self._adapters = adapters
        self.kv = KvPolicy(settings.kv)
        self.is_attached = settings.url is not None
        self.background = Background()
        self.folder = ExchangeFolder(dialect.name)
        # A server writes there once it starts; it is left for people.
        logs = f"astraflow-{dialect.name}-{os.getpid()}-{secrets.token_hex(8)}"
        self.server = InferenceServer(
            is_alive=dialect.is_alive,
            wake=self._take_over,
            launch=None if settings.url else self._launch,
            url=settings.url,
            log_file=Path(tempfile.gettempdir()) / logs / "server.log",
            start_s=settings.start_s,
            on_lost=on_lost,
            is_changing=is_changing,
        )
        try:
            # What would keep every start from succeeding is refused now.
            self._launch(0)
        except AstraflowError:
            self.folder.close()
            raise
        self._serving = self.background.start(self.server.run())

    async def close(self) -> None:
        """End the server and what is done beside it; the second time does nothing."""
        self.server.close()
        await asyncio.wait([self._serving])
        await self.background.close()
        self.folder.close()

    async def _take_over(self, http: httpx.AsyncClient) -> None:
        """Make sure of a server that somebody else started, and have it go on."""
        self.model.require_served(*await self.dialect.served_model(http))
        await self.dialect.wake(http)

    def _launch(self, port: int) -> ServerCommand:
        place = ServerSetup(
            model_dir=self.model.directory,
            port=port,
            folder=self.folder.path,
            settings=self._settings,
            max_context=self.model.max_context,
            adapters=self._adapters,
        )
        launch = self.dialect.launch(place)
        return replace(launch, env={**launch.env, **visible_gpus(self._settings, Machine.here())})
