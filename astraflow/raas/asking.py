"""Asking: a node that drives asks for a newer version after every so many tasks."""

import asyncio
from collections.abc import Mapping
from typing import Protocol

import structlog

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.rollouts import Rollout, TaskResult
from astraflow.core.versions import PublishAnswer
from astraflow.raas.runner import Results

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class Versions(Protocol):
    """Where a version can be asked for; `VersionClient` is one."""

    async def request_publish(self, policy_id: PolicyId) -> PublishAnswer:
        """Ask for a version with more steps."""
        ...


class AskingResults:
    """Passes results on, and asks for versions by their count."""

    def __init__(
        self, results: Results, versions: Versions, *, every: Mapping[PolicyId, int]
    ) -> None:
        """Count nothing yet.

        Args:
            results: Where they go.
            versions: Where versions are asked for.
            every: Tasks between two requests, by policy; one left out is never asked for.
        """
        self._results = results
        self._versions = versions
        self._every = every
        self._task_count = 0
        self._due: dict[PolicyId, None] = {}
        self._news = asyncio.Event()

    def send(self, rollout: Rollout) -> bool:
        """Send a rollout; False: it is larger than the run reads."""
        return self._results.send(rollout)

    def close_task(self, result: TaskResult) -> None:
        """Send the result of a task, and count it."""
        self._results.close_task(result)
        self._task_count += 1
        for policy_id, every in self._every.items():
            if self._task_count % every == 0:
                self._due[policy_id] = None
                self._news.set()

    async def run(self) -> None:
        """Ask whenever it is due, until cancelled; a request that was missed is not made up for.

        Raises:
            AstraflowError: What the run answers, but for NOT_READY: the trainer is gone for now.
        """
        while True:
            await self._news.wait()
            self._news.clear()
            while self._due:
                await self._ask(self._due.popitem()[0])

    async def _ask(self, policy_id: PolicyId) -> None:
        try:
            answer = await self._versions.request_publish(policy_id)
        except AstraflowError as error:
            if error.reason is not Reason.NOT_READY:
                raise
            log.warning("nobody can be asked for a version", policy_id=policy_id, why=str(error))
            return
        log.debug(
            "asked for a version",
            policy_id=policy_id,
            newest=answer.newest_version,
            is_pending=answer.is_pending,
        )
