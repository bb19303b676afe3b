"""The engine over a server: what all makes of servers have in common."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter

import structlog

from astraflow.config.recipe import EngineSettings
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.rollouts import KvPolicy
from astraflow.core.tasks import SamplingParams
from astraflow.core.tensors import SwapReport, WeightUpdate
from astraflow.engines.checks import apply_failed, no_weights, require_policy
from astraflow.engines.devices import is_on_cpu
from astraflow.engines.protocol import EngineLoad, Generation, Watch
from astraflow.engines.served.completion import CompletionClient, new_salt
from astraflow.engines.served.dialect import Dialect
from astraflow.engines.served.host import ServerHost
from astraflow.engines.served.model import ModelDescription
from astraflow.engines.served.routed_experts import split_experts
from astraflow.engines.served.server import Life
from astraflow.rpc.concurrency import to_the_end


class VersionHolds:
    """Lets a version change once nobody holds it; whoever comes meanwhile may still take hold.

    A server has one version at a time. So what is pinned (an evaluation) is finished before the
    next version goes live, and what is not pinned waits for it.

    Attributes:
        is_awaited: Whether the next version waits until nobody holds the live one.
        is_changing: Whether one version gives way to the next.
    """

    def __init__(self, live: Callable[[], int | None]) -> None:
        self._live = live
        self._counts = Counter[int]()
        self.is_awaited = False
        self.is_changing = False
        self._turn = asyncio.Condition()

    async def take(self, version: int) -> None:
        """Hold a version until `drop`; counted.

        Raises:
            AstraflowError: VERSION_NOT_SERVED when it is not live.
        """
        async with self._turn:
            await self._turn.wait_for(lambda: not self.is_changing)
            if version != self._live():
                raise AstraflowError(
                    Reason.VERSION_NOT_SERVED,
                    f"version {version} is not served, {self._live()} is; a server has one version",
                    retryable=True,
                )
            self._counts[version] += 1

    async def wait_unchanged(self) -> None:
        if self.is_changing:
            async with self._turn:
                await self._turn.wait_for(lambda: not self.is_changing)

    async def drop(self, version: int) -> None:
        async with self._turn:
            self._counts[version] -= 1
            if self._counts[version] <= 0:
                del self._counts[version]
            self._turn.notify_all()

    @asynccontextmanager
    async def changing(self, *, at_once: bool = False) -> AsyncGenerator[None]:
        """Wait until nobody holds a version, unless `at_once`; keep others from it meanwhile."""
        async with self._turn:
            self.is_awaited = True
            try:
                await self._turn.wait_for(lambda: at_once or not self._counts)
            finally:
                self.is_awaited = False
            self.is_changing = True
        try:
            yield
        finally:
            self.is_changing = False
            async with self._turn:
                self._turn.notify_all()


log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

Source = Callable[[], WeightUpdate]


# Between two tasks of an evaluation: its pin would be gone for good with the next version.
_LINGER_S = 2.0


class ServedEngine:
    """Generates with a server; one version at a time.

    An update is checked before the server hears of it, staged beside generation, and written
    into its live weights while it pauses between two steps. Whatever fails from the pause on
    ends the server: it is started again, and all weights are loaded, so that nothing
    half-applied is ever sampled from.

    Attributes:
        version: What newly sampled tokens are of; None before the first swap, and without a server.
    """

    # A server has only one.
    keeps_versions = False

    def __init__(
        self,
        dialect: Dialect,
        *,
        model: ModelDescription,
        settings: EngineSettings,
        policy_id: PolicyId,
    ) -> None:
        """Start the server, or attach to it; needs a running event loop.

        Raises:
            AstraflowError: INVALID_FIELD for what this make of server cannot do.
        """
        _require_kv(dialect, settings)
        self.tells_experts = _tells_experts(model, settings)
        self.name = dialect.name
        self.max_context_token_count = model.max_context
        self._dialect = dialect
        self._model = model
        self._policy_id = policy_id
        self.version: int | None = None
        self._holds = VersionHolds(lambda: self.version)
        self._source: Source | None = None
        self._one_at_a_time = asyncio.Lock()
        self._host = ServerHost(
            dialect,
            model=model,
            settings=settings,
            on_lost=self._lost,
            is_changing=lambda: self._holds.is_changing,
        )
        self._server, self._background = self._host.server, self._host.background
        self._completions = CompletionClient(self._host, tells_experts=self.tells_experts)
        self._meter = self._completions.meter
        self._pins: list[int] = []

    @property
    def pinned_versions(self) -> frozenset[int]:
        return frozenset(self._pins)

    def restore_from(self, source: Source) -> None:
        self._source = source

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        version: int | None = None,
        watch: Watch | None = None,
    ) -> Generation:
        """Sample one completion; see `Engine.generate`. What a seed draws is the server's own."""
        self._server.require_open()
        if self.version is None:
            raise no_weights()
        if version is None:
            await self._holds.wait_unchanged()
            return await self._completions.sample(prompt, sampling, watch, version=self.version)
        await self._holds.take(version)
        try:
            return await self._completions.sample(prompt, sampling, watch, version=version)
        finally:
            await self._holds.drop(version)

    async def swap(self, update: WeightUpdate) -> SwapReport:
        """Make a version live once the live one is not pinned; see `Engine.swap`."""
        self._server.require_open()
        require_policy(update, self._policy_id)
        return await to_the_end(self._background.start(self._swap(update)))

    async def pin(self, version: int) -> None:
        """Keep the live version: no other goes live before `unpin`; see `Engine.pin`."""
        self._server.require_open()
        await self._holds.take(version)
        self._pins.append(version)

    async def unpin(self, version: int) -> None:
        """Let a pinned version go, soon: the next task of the same evaluation is on its way."""
        if version in self._pins:
            self._pins.remove(version)
            self._background.start(self._linger(version))

    async def checksums(self) -> Mapping[str, str]:
        return await self._dialect.checksums(self._server.http)

    def load(self) -> EngineLoad:
        return self._meter.load()

    async def close(self) -> None:
        self._source = None
        await self._host.close()

    async def _swap(self, update: WeightUpdate) -> SwapReport:
        async with self._one_at_a_time:
            life = self._server.life
            await self._server.wait_up()
            update = await asyncio.to_thread(split_experts, update, self._model.shapes)
            await asyncio.to_thread(self._model.check, update, self.version)
            return await self._made_live(life, update)

    async def _restore(self) -> None:
        """Load all weights into a server that was started again, unless somebody did."""
        try:
            async with self._one_at_a_time:
                if self._source is None or self.version is not None:
                    return
                life = self._server.life
                await self._server.wait_up()
                update = split_experts(await asyncio.to_thread(self._source), self._model.shapes)
                await self._made_live(life, update, at_once=True)
        except AstraflowError as error:
            # The next start, or the next version, tries again.
            log.warning("weights not restored", why=error.message)
        else:
            log.info("weights restored", version=update.version)

    async def _made_live(
        self, life: Life, update: WeightUpdate, *, at_once: bool = False
    ) -> SwapReport:
        async with self._host.folder.file(update) as file:
            try:
                await self._dialect.stage(life.up.result(), file)
            except AstraflowError:
                raise
            except Exception as error:
                self._server.condemn(f"it did not stage an update: {error!r}", life)
                raise apply_failed(f"the server is lost: {error!r}") from error
            async with self._holds.changing(at_once=at_once):
                return await self._changed(life, file, update.version)

    async def _changed(self, life: Life, file: Path, version: int) -> SwapReport:
        """Change the weights in a pause; the server ends when anything in it goes wrong."""
        started, inflight_count = perf_counter(), self._meter.running_count
        failure: Exception | None = None
        try:
            await self._dialect.change(life.up.result(), file, version=version, kv=self._host.kv)
        except Exception as error:  # noqa: BLE001 - raised again below
            failure = error
        if failure is None and life.over.done():
            failure = life.over.result()
        if failure is not None:
            self._server.condemn(f"version {version} was not applied whole: {failure}", life)
            raise AstraflowError(
                Reason.APPLY_FAILED,
                f"version {version} was not applied whole, so the server starts again: {failure}",
            ) from failure
        pause_s = perf_counter() - started
        self.version, self._completions.salt = version, new_salt()
        return SwapReport(version=version, pause_s=pause_s, inflight_count=inflight_count)

    async def _linger(self, version: int) -> None:
        await asyncio.sleep(_LINGER_S)
        await self._holds.drop(version)

    def _lost(self) -> None:
        self.version = None
        self._background.start(self._restore())


def _tells_experts(model: ModelDescription, settings: EngineSettings) -> bool:
    """Return whether generations have routes.

    Raises:
        AstraflowError: INVALID_FIELD on a CPU, and for a dense model.
    """
    if settings.routed_experts and (is_on_cpu(settings) or not model.experts):
        why = "servers tell on GPUs only" if model.experts else f"{model.directory} has no experts"
        raise AstraflowError(
            Reason.INVALID_FIELD, f"raas.engine.routed_experts: {why}; leave it out"
        )
    return settings.routed_experts


def _require_kv(dialect: Dialect, settings: EngineSettings) -> None:
    if KvPolicy(settings.kv) not in dialect.kv_policies:
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"raas.engine.kv {settings.kv} is not for kind {dialect.name}; it can"
            f" {' or '.join(sorted(dialect.kv_policies))}",
        )
