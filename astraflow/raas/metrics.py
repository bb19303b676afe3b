"""How busy a node is, what it counts of its own work, and what it tells a scraper."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import partial

from astraflow.core.clock import Clock
from astraflow.core.ids import PolicyId
from astraflow.core.members import RaasLoad
from astraflow.core.rollouts import Rollout
from astraflow.core.tensors import SwapReport
from astraflow.engines.protocol import Engine, EngineLoad
from astraflow.telemetry.metrics import LONG_SECONDS, Family, Histogram, counter, gauge, histogram
from astraflow.transport.lanes import RECEIVED_NBYTES


class LoadMeter:
    """Measures the time in which no engine had anything to decode, and sums up loads.

    A request to an engine is made within `with meter`.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._request_count = 0
        self._idle_since = self._reported_at = clock.monotonic()
        self._idle_s = 0.0
        self._sampled_count = 0

    def __enter__(self) -> None:
        if self._request_count == 0:
            self._idle_s += self._clock.monotonic() - self._idle_since
        self._request_count += 1

    def __exit__(self, *_: object) -> None:
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


class NodeCounters:
    """Counts since the process began.

    Attributes:
        rollouts: Sent, by outcome.
        tokens: Sampled ones in these, by policy.
        episode: Seconds from the start of a rollout to its end.
        pull: Seconds to pull and verify a version, by policy.
        stage: Seconds to prepare a swap beside generation, by policy.
        pause: Seconds that an engine stood still for a swap, by policy.
        failed: Updates that did not go live, by policy and reason.
    """

    def __init__(self) -> None:
        self.rollouts = Counter[tuple[str]]()
        self.tokens = Counter[tuple[str]]()
        self.episode = Histogram(LONG_SECONDS)
        made = partial(Histogram, LONG_SECONDS)
        self.pull = defaultdict[tuple[str], Histogram](made)
        self.stage = defaultdict[tuple[str], Histogram](made)
        self.pause = defaultdict[tuple[str], Histogram](made)
        self.failed = Counter[tuple[str, str]]()

    def sent(self, rollout: Rollout) -> None:
        """Count a rollout."""
        self.rollouts[(rollout.outcome,)] += 1
        for one in rollout.trajectories:
            self.tokens[(one.policy_id,)] += one.sampled_count
        if rollout.start_time is not None and rollout.finish_time is not None:
            self.episode.observe((rollout.finish_time - rollout.start_time).total_seconds())

    def live(self, policy_id: PolicyId, *, pull_s: float, swap_s: float, swap: SwapReport) -> None:
        """Count a version that went live."""
        self.pull[policy_id,].observe(pull_s)
        self.stage[policy_id,].observe(swap_s - swap.pause_s)
        self.pause[policy_id,].observe(swap.pause_s)


def node_families(
    engines: Mapping[PolicyId, Engine],
    counters: NodeCounters,
    *,
    running_count: int,
    queued_count: int,
    capacity: int,
) -> Iterator[Family]:
    """Yield what a node tells; on its event loop."""
    loads = [engine.load() for engine in engines.values()]
    queued = sum(load.queued_count for load in loads)
    used = max((load.kv_fraction for load in loads), default=0.0)
    yield gauge("node_running_rollouts", "In progress.", running_count)
    yield gauge("node_queued_rollouts", "That wait for a place or a version.", queued_count)
    yield gauge("node_capacity_rollouts", "That it runs at once.", capacity)
    yield gauge("node_engine_queued_requests", "In its engines.", queued)
    yield gauge("node_kv_used_ratio", "Of the KV cache.", used)
    live: dict[tuple[str, ...], int | None]
    live = {(policy_id,): engine.version for policy_id, engine in engines.items()}
    versions = {key: float(version) for key, version in live.items() if version is not None}
    yield gauge("node_version", "That its engine samples with.", versions, "policy")
    rollouts = {key: float(count) for key, count in counters.rollouts.items()}
    tokens = {key: float(count) for key, count in counters.tokens.items()}
    failed = {key: float(count) for key, count in counters.failed.items()}
    lanes = {(lane,): float(count) for lane, count in RECEIVED_NBYTES.items()}
    yield counter("node_rollouts_total", "Sent to the hub, by outcome.", rollouts, "outcome")
    yield counter("node_sampled_tokens_total", "In these.", tokens, "policy")
    yield histogram("node_episode_seconds", "From start to end of a rollout.", counters.episode)
    yield counter("node_weights_received_bytes_total", "Payload, by lane.", lanes, "lane")
    yield histogram("node_pull_seconds", "To pull and verify a version.", counters.pull, "policy")
    yield histogram(
        "node_stage_seconds", "To make a swap ready beside generation.", counters.stage, "policy"
    )
    yield histogram(
        "node_pause_seconds", "The engine stood still for a swap.", counters.pause, "policy"
    )
    yield counter(
        "node_weights_failed_total", "Updates not reached.", failed, *("policy", "reason")
    )
