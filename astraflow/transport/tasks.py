"""Tasks: what a host has running for its connections, ended with it."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class Tasks:
    """Runs coroutines whose failure concerns nobody else; a defect is logged."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run work until it ends or all is closed."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    async def close(self) -> None:
        """Cancel what runs and wait until it has ended."""
        while running := list(self._running):
            for task in running:
                task.cancel()
            await asyncio.wait(running)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a lane's task failed through a defect", exc_info=error)
