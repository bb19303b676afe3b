"""Weights: every version is pulled beside generation and swapped in between decode steps."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from time import perf_counter
from typing import Final, Protocol

import structlog

from astraflow.client.raas import VersionClient
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.rollouts import TaskResult
from astraflow.core.tensors import SwapReport, WeightUpdate
from astraflow.core.versions import (
    UNSOUND,
    SourceKind,
    VersionInfo,
    VersionReport,
    VersionState,
)
from astraflow.engines.protocol import Engine
from astraflow.raas.metrics import NodeCounters
from astraflow.raas.policies import VersionGate
from astraflow.raas.runner import Results
from astraflow.rpc.concurrency import Backoff, beside
from astraflow.weights.fetch.lanes import ListVersions
from astraflow.weights.fetch.puller import PullFailed, PullResult

# Each may cost a whole copy of the weights; what is registered or kept wrongly stays so.
_UNSOUND_COUNT: Final = 3


class Attempts:
    """Counts the attempts that failed.

    A source that is away comes back, so a version that nobody gives is tried until it is had.
    One that was had and is not what the run registered is tried three times: then it is over,
    until the run announces it anew. The next version is tried in any case.

    Attributes:
        failure_count: In a row.
    """

    def __init__(self, backoff: Backoff) -> None:
        self.failure_count = 0
        self._backoff = backoff
        self._unsound = Counter[int]()

    def failed(self, version: int, reason: Reason) -> float:
        """Count an attempt; return the seconds to wait before the next one."""
        self.failure_count += 1
        if reason in UNSOUND:
            self._unsound[version] += 1
        return self._backoff.pause_s(self.failure_count)

    def succeeded(self) -> None:
        """Begin anew."""
        self.failure_count = 0
        self._unsound.clear()

    def announced(self, version: int) -> None:
        """Give a version its attempts: the run has said something new of it."""
        self._unsound.pop(version, None)

    def are_over(self, version: int) -> bool:
        """Whether a version is not tried again."""
        return self._unsound[version] >= _UNSOUND_COUNT


# Of these only the patches matter: a chain longer than this is never shorter than the whole.
_KNOWN_VERSIONS = 64

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class Puller(Protocol):
    """What is needed to get weights; `astraflow.weights.fetch.puller.WeightPuller` is one."""

    async def pull(
        self,
        target: VersionInfo,
        known: Mapping[int, VersionInfo],
        transfer_token: bytes,
        *,
        listed: ListVersions | None = None,
    ) -> PullResult:
        """Get a verified version, staged beside what is held."""
        ...

    def full_update(self) -> WeightUpdate:
        """Return all that is held, dense."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...


class VersionFollower:
    """For a node without engines: every version is there as soon as it is known; a `Puller`."""

    def __init__(self, policy_id: PolicyId) -> None:
        """Follow the versions of a policy."""
        self._update = WeightUpdate(policy_id=policy_id, version=-1, base_version=None, tensors=())

    async def pull(
        self,
        target: VersionInfo,
        known: Mapping[int, VersionInfo],
        transfer_token: bytes,
        *,
        listed: ListVersions | None = None,
    ) -> PullResult:
        """Return the version without its weights."""
        del known, transfer_token, listed
        self._update = replace(self._update, version=target.version)
        return PullResult(update=self._update, nbytes=0, duration=timedelta(), reports=())

    def full_update(self) -> WeightUpdate:
        """Return the version without its weights."""
        return self._update

    async def close(self) -> None:
        """Nothing to do: it has no connections."""


class WeightUpdater:
    """Keeps one engine at the newest version, or at the one that a task must have first."""

    def __init__(
        self,
        policy_id: PolicyId,
        *,
        engine: Engine,
        gate: VersionGate,
        puller: Puller,
        versions: VersionClient,
        transfer_token: Callable[[], bytes],
        is_relay: bool = False,
        kinds: Collection[SourceKind] | None = None,
        counters: NodeCounters | None = None,
    ) -> None:
        """Hold no version yet; with `kinds`, one counts once a source of these has it."""
        self._kinds = kinds
        self._counters = counters or NodeCounters()
        self._policy_id = policy_id
        self._engine = engine
        self._gate = gate
        self._puller = puller
        self._versions = versions
        self._transfer_token = transfer_token
        self._is_relay = is_relay
        self._attempts = Attempts(Backoff(first_s=0.2, limit_s=10.0))
        engine.restore_from(puller.full_update)
        self._known: dict[int, VersionInfo] = {}
        self._published = asyncio.Event()

    async def run(self) -> None:
        """Follow the versions until cancelled.

        Raises:
            AstraflowError: POLICY_UNKNOWN; NOT_READY when the hub could not be reached.
        """
        try:
            async with beside(self._watch(), self._gate.follow()):
                while True:
                    self._published.clear()
                    target = self._target()
                    if target is None:
                        await self._published.wait()
                    else:
                        await self._update(target)
        finally:
            await self._puller.close()

    async def _watch(self) -> None:
        async for info in self._versions.watch(self._policy_id):
            if self._kinds is not None and not any(s.kind in self._kinds for s in info.sources):
                continue
            self._known[info.version] = info
            self._attempts.announced(info.version)
            for version in sorted(self._known)[:-_KNOWN_VERSIONS]:
                del self._known[version]
            self._published.set()

    def _target(self) -> VersionInfo | None:
        """Return what to update to; None: there is nothing that can be had."""
        if not self._known:
            return None
        newest = max(self._known)
        target = self._gate.next_target(newest)
        # One that is not to be had here holds no other back: who waits for it is told so.
        if target not in self._known or self._attempts.are_over(target):
            target = newest
        if target == self._engine.version or self._attempts.are_over(target):
            return None
        return self._known[target]

    async def _update(self, target: VersionInfo) -> None:
        base = self._engine.version
        try:
            pulled = await self._pull(target)
            async with self._gate.swapping():
                started = perf_counter()
                swap = await self._swap(pulled.update)
                swap_s = perf_counter() - started
        except AstraflowError as error:
            await self._failed(target, error)
            return
        self._attempts.succeeded()
        self._counters.live(
            self._policy_id,
            pull_s=pulled.duration.total_seconds(),
            swap_s=swap_s,
            swap=swap,
        )
        await self._live(target, pulled, swap, base)

    async def _pull(self, target: VersionInfo) -> PullResult:
        """Pull from who has the version now, and say that others may have it from here."""
        if self._attempts.failure_count:
            target = await self._found_again(target)
        pulling = self._puller.pull(
            target,
            self._known,
            self._transfer_token(),
            listed=lambda: self._versions.versions(self._policy_id),
        )
        if not self._is_relay:
            return await pulling
        report = VersionReport(
            policy_id=self._policy_id,
            version=target.version,
            state=VersionState.PULLING,
            base_version=self._engine.version,
        )
        async with beside(self._report(report)):
            return await pulling

    async def _found_again(self, target: VersionInfo) -> VersionInfo:
        """Ask who has a version now: those who had it when it was announced have failed."""
        try:
            sources = await self._versions.sources(self._policy_id, target.version)
        except AstraflowError as error:
            log.warning("sources are not listed", version=target.version, why=str(error))
            return target
        return replace(target, sources=sources)

    async def _swap(self, update: WeightUpdate) -> SwapReport:
        if update.base_version not in (None, self._engine.version):
            # An earlier swap failed: the engine is behind what the puller holds.
            update = self._puller.full_update()
        try:
            return await self._engine.swap(update)
        except AstraflowError as error:
            if error.reason is not Reason.APPLY_FAILED or update.base_version is None:
                raise
            log.warning(
                "swap failed, trying all tensors", policy_id=self._policy_id, why=str(error)
            )
        return await self._engine.swap(self._puller.full_update())

    async def _live(
        self, target: VersionInfo, pulled: PullResult, swap: SwapReport, base: int | None
    ) -> None:
        log.info(
            "version live",
            policy_id=self._policy_id,
            version=target.version,
            pulled_nbytes=pulled.nbytes,
            pull_s=round(pulled.duration.total_seconds(), 4),
            pause_s=round(swap.pause_s, 4),
            inflight_count=swap.inflight_count,
        )
        await self._report(
            VersionReport(
                policy_id=self._policy_id,
                version=target.version,
                state=VersionState.LIVE,
                base_version=base,
                pull_duration=pulled.duration,
                verify_duration=pulled.times.verify,
                decode_duration=pulled.times.decode,
                stage_duration=pulled.times.stage,
                pause_duration=timedelta(seconds=swap.pause_s),
                pulled_nbytes=pulled.nbytes,
                reports=pulled.reports,
            )
        )

    async def _failed(self, target: VersionInfo, error: AstraflowError) -> None:
        """Report it; the version before serves on.

        The next attempt follows after a pause, or once the run announces something.
        """
        log.error(
            "version not reached", policy_id=self._policy_id, version=target.version, why=str(error)
        )
        if error.reason is Reason.VERSION_EVICTED and target.version < max(self._known):
            # It comes no more: a task that must have it is given back once a newer one is live.
            self._known.pop(target.version, None)
        pause_s = self._attempts.failed(target.version, error.reason)
        self._counters.failed[self._policy_id, error.reason] += 1
        await self._report(
            VersionReport(
                policy_id=self._policy_id,
                version=target.version,
                state=VersionState.FAILED,
                failure=error.to_failure(),
                base_version=self._engine.version,
                reports=error.reports if isinstance(error, PullFailed) else (),
            )
        )
        with suppress(TimeoutError):
            await asyncio.wait_for(self._published.wait(), pause_s)
        if self._engine.version == target.version:
            # Its server was lost, and is back with all that is held: nothing is left to try.
            self._attempts.succeeded()
            await self._report(
                VersionReport(
                    policy_id=self._policy_id, version=target.version, state=VersionState.LIVE
                )
            )

    async def _report(self, report: VersionReport) -> None:
        try:
            await self._versions.report(report)
        except AstraflowError as error:
            if error.reason is not Reason.VERSION_UNKNOWN:
                raise
            # A hub that lost its state; the next version will be known to both.
            log.warning("the run does not know the version", version=report.version)


class PublishRequester:
    """Passes results on, and asks for versions by their count."""

    def __init__(
        self, results: Results, versions: VersionClient, *, every: Mapping[PolicyId, int]
    ) -> None:
        """Count nothing yet; `every`: tasks between two requests, by policy; left out: never."""
        self._results = results
        self.send = results.send
        """Send a rollout; False: it is larger than the run reads."""
        self._versions = versions
        self._every = every
        self._task_count = 0
        self._due: dict[PolicyId, None] = {}
        self._is_due = asyncio.Event()

    def close_task(self, result: TaskResult) -> None:
        """Send the result of a task, and count it."""
        self._results.close_task(result)
        self._task_count += 1
        for policy_id, every in self._every.items():
            if self._task_count % every == 0:
                self._due[policy_id] = None
                self._is_due.set()

    async def run(self) -> None:
        """Ask whenever it is due, until cancelled; a request that was missed is not made up for.

        Raises:
            AstraflowError: What the run answers, but for NOT_READY: the trainer is gone for now.
        """
        while True:
            await self._is_due.wait()
            self._is_due.clear()
            while self._due:
                await self._request(self._due.popitem()[0])

    async def _request(self, policy_id: PolicyId) -> None:
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
