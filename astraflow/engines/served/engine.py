"""The engine over a server: what all makes of servers have in common."""

import asyncio
from collections.abc import Mapping, Sequence

from astraflow.config.recipe import EngineSettings
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.rollouts import KvPolicy
from astraflow.core.tasks import SamplingParams
from astraflow.core.tensors import SwapReport, WeightUpdate
from astraflow.engines.checks import require_policy
from astraflow.engines.protocol import EngineLoad, Generation, Watch
from astraflow.engines.served.asking import Asking
from astraflow.engines.served.devices import is_on_cpu
from astraflow.engines.served.dialect import Dialect
from astraflow.engines.served.host import ServerHost
from astraflow.engines.served.meter import Meter
from astraflow.engines.served.model import Model
from astraflow.engines.served.silence import end_silence
from astraflow.engines.served.swapping import Source, Swapping

# Between two tasks of an evaluation: its pin would be gone for good with the next version.
_LINGER_S = 2.0


class ServedEngine:
    """Generates with a server; one version at a time.

    An update is checked before the server hears of it, staged beside generation, and written
    into its live weights while it pauses between two steps. Whatever fails from the pause on
    ends the server: it is started again, and all weights are loaded, so that nothing
    half-applied is ever sampled from.
    """

    def __init__(
        self, dialect: Dialect, *, model: Model, settings: EngineSettings, policy_id: PolicyId
    ) -> None:
        """Start the server, or attach to it; needs a running event loop.

        Raises:
            AstraflowError: INVALID_FIELD for what this make of server cannot do.
        """
        kv = _kv_policy(dialect, settings)
        self.tells_experts = _tells_experts(dialect, model, settings)
        self._dialect = dialect
        self._model = model
        self._policy_id = policy_id
        self._meter = Meter()
        self._host = ServerHost(dialect, model=model, settings=settings, on_lost=self._lost)
        self._server, self._background = self._host.server, self._host.background
        self._swapping = Swapping(
            dialect,
            model=model,
            server=self._server,
            meter=self._meter,
            folder=self._host.folder,
            kv=kv,
        )
        self._asking = Asking(
            dialect,
            model=model,
            server=self._server,
            meter=self._meter,
            background=self._background,
            kv=kv,
            tells_experts=self.tells_experts,
        )
        self._pins: list[int] = []
        self._background.start(self._meter.follow(self._server, dialect))
        self._background.start(
            end_silence(
                self._server, self._meter, is_changing=lambda: self._swapping.holds.is_changing
            )
        )

    @property
    def name(self) -> str:
        """Make of the server."""
        return self._dialect.name

    @property
    def version(self) -> int | None:
        """What newly sampled tokens are of; None before the first swap, and without a server."""
        return self._swapping.version

    @property
    def pinned_versions(self) -> frozenset[int]:
        """The live one, when it is pinned."""
        return frozenset(self._pins)

    @property
    def keeps_versions(self) -> bool:
        """Whether a pinned version serves on beside a newer one: a server has only one."""
        return False

    @property
    def max_context_token_count(self) -> int:
        """Prompt and completion together."""
        return self._model.max_context

    def restore_from(self, source: Source) -> None:
        """Say where all weights are had when the server was lost."""
        self._swapping.source = source

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        version: int | None = None,
        watch: Watch | None = None,
    ) -> Generation:
        """Sample one completion; see `Engine.generate`. What a seed draws is the server's own."""
        self._require_weights()
        if version is None:
            await self._swapping.holds.settled()
            return await self._asking.sample(prompt, sampling, watch, version=self.version)
        await self._swapping.holds.take(version)
        try:
            return await self._asking.sample(prompt, sampling, watch, version=version)
        finally:
            await self._swapping.holds.drop(version)

    async def swap(self, update: WeightUpdate) -> SwapReport:
        """Make a version live once the live one is not pinned; see `Engine.swap`."""
        self._server.require_open()
        require_policy(update, self._policy_id)
        return await self._background.finish(self._swapping.swap(update))

    async def pin(self, version: int) -> None:
        """Keep the live version: no other goes live before `unpin`; see `Engine.pin`."""
        self._server.require_open()
        await self._swapping.holds.take(version)
        self._pins.append(version)

    async def unpin(self, version: int) -> None:
        """Let a pinned version go, soon: the next task of the same evaluation is on its way."""
        if version in self._pins:
            self._pins.remove(version)
            self._background.start(self._linger(version))

    async def checksums(self) -> Mapping[str, str]:
        """Return the server's checksum of each of its parameters; reads all of them."""
        return await self._dialect.checksums(self._server.http)

    def load(self) -> EngineLoad:
        """Return how busy it is, by the server's last word."""
        return self._meter.load()

    async def close(self) -> None:
        """End the server; running generations end with ENGINE_FAILED."""
        self._swapping.source = None
        await self._host.close()

    async def _linger(self, version: int) -> None:
        await asyncio.sleep(_LINGER_S)
        await self._swapping.holds.drop(version)

    def _lost(self) -> None:
        """The weights are gone with the server."""
        self._swapping.version = None
        self._background.start(self._swapping.restore())

    def _require_weights(self) -> None:
        self._server.require_open()
        if self.version is None:
            raise AstraflowError(
                Reason.VERSION_NOT_SERVED, "the engine has no weights yet", retryable=True
            )


def _tells_experts(dialect: Dialect, model: Model, settings: EngineSettings) -> bool:
    """Return whether generations have routes.

    Raises:
        AstraflowError: INVALID_FIELD for a mixture of experts that the server cannot serve here,
            and for routes of a dense model.
    """
    if model.experts and is_on_cpu(settings) and not dialect.has_experts_on_cpu:
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"{model.directory} is a mixture of experts, of which {dialect.name} takes no new"
            " versions on a CPU: take raas.engine.kind embedded, or a GPU",
        )
    if settings.routed_experts and (is_on_cpu(settings) or not model.experts):
        why = "servers tell on GPUs only" if model.experts else f"{model.directory} has no experts"
        raise AstraflowError(
            Reason.INVALID_FIELD, f"raas.engine.routed_experts: {why}; leave it out"
        )
    return settings.routed_experts


def _kv_policy(dialect: Dialect, settings: EngineSettings) -> KvPolicy:
    kv = KvPolicy(settings.kv)
    if kv not in dialect.kv_policies:
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"raas.engine.kv {kv} is not for kind {dialect.name}; it can"
            f" {' or '.join(sorted(dialect.kv_policies))}",
        )
    return kv
