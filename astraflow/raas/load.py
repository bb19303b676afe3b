"""How busy a node is: what its engines did since the last report."""

from collections.abc import Callable, Iterable, Sequence

from astraflow.core.clock import Clock
from astraflow.core.members import RaasLoad
from astraflow.core.tasks import SamplingParams
from astraflow.core.tensors import SwapReport, WeightUpdate
from astraflow.engines.protocol import Engine, EngineLoad, Generation, TellsExperts, Watch


class LoadMeter:
    """Measures the time in which no engine had anything to decode, and sums up loads."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._request_count = 0
        self._idle_since = self._reported_at = clock.monotonic()
        self._idle_s = 0.0
        self._sampled_count = 0

    def begin(self) -> None:
        """Note a request to an engine."""
        if self._request_count == 0:
            self._idle_s += self._clock.monotonic() - self._idle_since
        self._request_count += 1

    def end(self) -> None:
        """Note its end."""
        self._request_count -= 1
        if self._request_count == 0:
            self._idle_since = self._clock.monotonic()

    def report(
        self,
        engines: Iterable[EngineLoad],
        *,
        inflight_count: int,
        queued_count: int,
        capacity: int,
    ) -> RaasLoad:
        """Return the load since the last report, and begin a new one."""
        loads = tuple(engines)
        now = self._clock.monotonic()
        if self._request_count == 0:
            self._idle_s += now - self._idle_since
            self._idle_since = now
        span_s = max(now - self._reported_at, 1e-9)
        sampled_count = sum(load.sampled_token_count for load in loads)
        report = RaasLoad(
            inflight_count=inflight_count,
            queued_count=queued_count,
            capacity=capacity,
            tokens_per_s=(sampled_count - self._sampled_count) / span_s,
            kv_fraction=max((load.kv_fraction for load in loads), default=0.0),
            engine_queued_count=sum(load.queued_count for load in loads),
            wait_fraction=min(1.0, self._idle_s / span_s),
        )
        self._reported_at, self._idle_s, self._sampled_count = now, 0.0, sampled_count
        return report


class MeteredEngine:
    """An engine whose requests a meter counts."""

    def __init__(self, engine: Engine, meter: LoadMeter) -> None:
        self._engine = engine
        self._meter = meter

    @property
    def name(self) -> str:
        """Name and release."""
        return self._engine.name

    @property
    def version(self) -> int | None:
        """What newly sampled tokens are of."""
        return self._engine.version

    @property
    def pinned_versions(self) -> frozenset[int]:
        """Older versions that can still be asked for."""
        return self._engine.pinned_versions

    @property
    def keeps_versions(self) -> bool:
        """Whether a pinned version serves on beside newer ones."""
        return self._engine.keeps_versions

    @property
    def max_context_token_count(self) -> int:
        """Prompt and completion together."""
        return self._engine.max_context_token_count

    @property
    def tells_experts(self) -> bool:
        """Whether generations have `routed_experts`."""
        return isinstance(self._engine, TellsExperts) and self._engine.tells_experts

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        version: int | None = None,
        watch: Watch | None = None,
    ) -> Generation:
        """Sample one completion; see Engine."""
        self._meter.begin()
        try:
            return await self._engine.generate(prompt, sampling, version=version, watch=watch)
        finally:
            self._meter.end()

    async def swap(self, update: WeightUpdate) -> SwapReport:
        """Make a version live; see Engine."""
        return await self._engine.swap(update)

    def restore_from(self, source: Callable[[], WeightUpdate]) -> None:
        """Say where all weights are had; see Engine."""
        self._engine.restore_from(source)

    async def pin(self, version: int) -> None:
        """Keep a version; see Engine."""
        await self._engine.pin(version)

    async def unpin(self, version: int) -> None:
        """Let a version go; see Engine."""
        await self._engine.unpin(version)

    def load(self) -> EngineLoad:
        """Return how busy it is now."""
        return self._engine.load()

    async def close(self) -> None:
        """Stop."""
        await self._engine.close()
