"""The engines of policies that adapt one model, over one server."""

import asyncio
import shutil
import uuid
from collections.abc import Mapping, Sequence
from itertools import count, cycle
from time import perf_counter

import httpx
import structlog

from astraflow.config.recipe import EngineSettings, Lora
from astraflow.core.errors import AstraflowError
from astraflow.core.ids import PolicyId
from astraflow.core.tasks import SamplingParams
from astraflow.core.tensors import SwapReport, WeightUpdate
from astraflow.engines.checks import apply_failed, require_policy
from astraflow.engines.protocol import EngineLoad, Generation, Watch
from astraflow.engines.served.adapters import (
    Adapter,
    AdapterVersions,
    Tensors,
    adapter_model,
    changed,
    targets_of,
    write_adapter,
)
from astraflow.engines.served.completion import CompletionClient
from astraflow.engines.served.dialect import AdapterLimits, Dialect
from astraflow.engines.served.engine import Source
from astraflow.engines.served.exchange import written
from astraflow.engines.served.host import ServerHost
from astraflow.engines.served.model import ModelDescription
from astraflow.engines.served.server import OTHER_FORM, Life
from astraflow.rpc.concurrency import to_the_end

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

# Of one policy: what is live, what an evaluation has pinned, what it had pinned before, and one
# that ends. With fewer, a pin that waits for the next version could keep it from coming.
_VERSION_COUNT = 4

# A server's metrics name each adapter that ever was: names come again, late enough for a request
# that was withdrawn.
_NAME_COUNT = 16


class AdapterEngine:
    """Generates with the adapters of one policy.

    Each version is an adapter of its own in the server. What began with one ends with it, so its
    tokens are of one version; what begins later takes the newest. Nothing pauses but for the time
    in which the server reads an adapter, and requests of other policies never notice.
    """

    keeps_versions = True
    tells_experts = False

    def __init__(
        self,
        policy_id: PolicyId,
        host: ServerHost,
        settings: Lora,
        model: ModelDescription,
        *,
        siblings: "Sequence[AdapterEngine]",
    ) -> None:
        self._policy_id = policy_id
        self._host = host
        self._siblings = siblings
        self._settings = settings
        self._model = model
        self._versions = AdapterVersions(
            _VERSION_COUNT, lambda each: host.background.start(self._unload(each))
        )
        self._held: Tensors = {}
        self._one_at_a_time = asyncio.Lock()
        self._numbers = count()
        made = uuid.uuid4().hex[:8]
        self._names = cycle([f"{policy_id}-{made}-{index}" for index in range(_NAME_COUNT)])
        self._completions = CompletionClient(host)
        self._meter = self._completions.meter
        self.name = host.dialect.name
        self.max_context_token_count = model.max_context

    @property
    def version(self) -> int | None:
        """What new requests are sampled with; None before the first swap, and without a server."""
        live = self._versions.live
        return None if live is None or live.life is not self._life else live.version

    @property
    def pinned_versions(self) -> frozenset[int]:
        return self._versions.pinned_versions

    def restore_from(self, source: Source) -> None:
        """Nothing to note: a server that was started again reads the adapters' files once more."""

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        version: int | None = None,
        watch: Watch | None = None,
    ) -> Generation:
        self._host.server.require_open()
        with self._versions.using(version, self._life) as adapter:
            return await self._completions.sample(
                prompt, sampling, watch, version=adapter.version, adapter=adapter.name
            )

    async def swap(self, update: WeightUpdate) -> SwapReport:
        """Let new requests take a version, once there is a place for it; see `Engine.swap`."""
        self._host.server.require_open()
        require_policy(update, self._policy_id)
        return await to_the_end(self._host.background.start(self._swap(update)))

    async def pin(self, version: int) -> None:
        self._host.server.require_open()
        self._versions.pin(version, self._life)

    async def unpin(self, version: int) -> None:
        self._versions.unpin(version)

    def load(self) -> EngineLoad:
        return self._meter.load()

    async def close(self) -> None:
        """End the server, for all its policies, or leave it as it was; again does nothing."""
        if self._host.is_attached and self._host.server.life.is_up:
            for each in self._siblings:
                await each.leave()
        await self._host.close()

    async def restore(self) -> None:
        """Have a server that was started again read all versions that are kept."""
        try:
            async with self._one_at_a_time:
                for adapter in reversed(self._versions.kept):
                    if adapter.life is not self._life:
                        await self._load(adapter)
        except (AstraflowError, httpx.HTTPError, *OTHER_FORM) as error:
            # The next start, or the next version, tries again.
            log.warning("adapters not restored", policy_id=self._policy_id, why=str(error))

    async def leave(self) -> None:
        for adapter in self._versions.kept:
            await self._unload(adapter)

    async def _swap(self, update: WeightUpdate) -> SwapReport:
        async with self._one_at_a_time:
            await self._host.server.wait_up()
            live = self._versions.live
            await asyncio.to_thread(self._model.check, update, live and live.version)
            tensors = changed(self._held, update)
            await self._versions.wait_free()
            adapter = await self._written(update.version, tensors)
            started, inflight_count = perf_counter(), self._meter.running_count
            try:
                await self._load(adapter)
            except (AstraflowError, httpx.HTTPError, *OTHER_FORM) as error:
                shutil.rmtree(adapter.folder, ignore_errors=True)
                raise apply_failed(f"version {update.version} was not loaded: {error}") from error
            pause_s = perf_counter() - started
            self._held = tensors
            self._versions.put(adapter)
        return SwapReport(version=update.version, pause_s=pause_s, inflight_count=inflight_count)

    async def _written(self, version: int, tensors: Tensors) -> Adapter:
        """Write a version where the server will read it."""
        nbytes = sum(part.nbytes for part in tensors.values())
        place = self._host.folder.folder_for(nbytes)
        folder = place / f"{self._policy_id}-{next(self._numbers)}"
        base = self._model.directory
        try:
            with written(nbytes):
                await asyncio.to_thread(write_adapter, folder, tensors, self._settings, base=base)
        except AstraflowError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        taken = {kept.name for kept in self._versions.kept}
        name = next(name for name in self._names if name not in taken)
        return Adapter(version=version, name=name, folder=folder, life=self._life)

    async def _load(self, adapter: Adapter) -> None:
        life = self._life
        http = await self._host.server.wait_up()
        await self._host.dialect.load_adapter(http, adapter.name, adapter.folder)
        adapter.life = life

    async def _unload(self, adapter: Adapter) -> None:
        """Take a version from the server, if that one has it still."""
        try:
            if adapter.life is self._life:
                await self._taken_away(adapter.name)
        except (AstraflowError, httpx.HTTPError, *OTHER_FORM) as error:
            log.warning("adapter not unloaded", name=adapter.name, why=str(error))
        shutil.rmtree(adapter.folder, ignore_errors=True)
        self._versions.forget(adapter)

    async def _taken_away(self, name: str) -> None:
        """Have the server forget a version; once more, if it was just closing the connection."""
        server, dialect = self._host.server, self._host.dialect
        try:
            await dialect.unload_adapter(server.http, name)
        except httpx.TransportError:
            # Not by the same client: if the server is lost, it is closed.
            await dialect.unload_adapter(server.http, name)

    @property
    def _life(self) -> Life:
        return self._host.server.life


def adapter_engines(
    dialect: Dialect,
    *,
    model: ModelDescription,
    settings: EngineSettings,
    policies: Mapping[PolicyId, Lora],
) -> Mapping[PolicyId, AdapterEngine]:
    """Start one server, and return the engines of the policies that adapt its model.

    The server reads the model's weights from its directory; adapters come by `swap`, each policy's
    on its own. Closing one engine closes all. Needs a running event loop.

    Raises:
        AstraflowError: INVALID_FIELD when the model, the settings or the targets do not fit.
    """
    models = {policy: adapter_model(model, lora) for policy, lora in policies.items()}
    room = AdapterLimits(
        count=_VERSION_COUNT * len(policies),
        rank=max(lora.rank for lora in policies.values()),
        targets=targets_of(name for adapted in models.values() for name in adapted.shapes),
    )
    engines: list[AdapterEngine] = []

    def restore() -> None:
        for engine in engines:
            host.background.start(engine.restore())

    host = ServerHost(dialect, model=model, settings=settings, on_lost=restore, adapters=room)
    engines += (
        AdapterEngine(policy, host, policies[policy], adapted, siblings=engines)
        for policy, adapted in models.items()
    )
    return dict(zip(models, engines, strict=True))
