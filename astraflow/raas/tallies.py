"""What a node counts of its own work, and tells a scraper."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from astraflow.core.ids import PolicyId
from astraflow.core.members import RaasLoad
from astraflow.core.rollouts import Rollout
from astraflow.core.tensors import SwapReport
from astraflow.telemetry.metrics import LONG_SECONDS, Family, Histogram, counter, gauge, histogram
from astraflow.transport.lanes import RECEIVED_NBYTES


class NodeTallies:
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
        self.pull: dict[tuple[str], Histogram] = {}
        self.stage: dict[tuple[str], Histogram] = {}
        self.pause: dict[tuple[str], Histogram] = {}
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
        spans = (self.pull, pull_s), (self.stage, swap_s - swap.pause_s), (self.pause, swap.pause_s)
        for held, seconds in spans:
            held.setdefault((policy_id,), Histogram(LONG_SECONDS)).observe(seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A node at one moment.

    Attributes:
        load: As it would report it.
        versions: Of its engines.
        counts: What it counted.
    """

    load: RaasLoad
    versions: dict[str, int | None]
    counts: tuple[Family, ...]


def count_families(tallies: NodeTallies) -> Iterator[Family]:
    """Yield what a node counted."""
    rollouts = {key: float(count) for key, count in tallies.rollouts.items()}
    tokens = {key: float(count) for key, count in tallies.tokens.items()}
    failed = {key: float(count) for key, count in tallies.failed.items()}
    lanes = {(lane,): float(count) for lane, count in RECEIVED_NBYTES.items()}
    yield counter("node_rollouts_total", "Sent to the hub, by outcome.", rollouts, "outcome")
    yield counter("node_sampled_tokens_total", "In these.", tokens, "policy")
    yield histogram("node_episode_seconds", "From start to end of a rollout.", tallies.episode)
    yield counter("node_weights_received_bytes_total", "Payload, by lane.", lanes, "lane")
    yield histogram("node_pull_seconds", "To pull and verify a version.", tallies.pull, "policy")
    yield histogram(
        "node_stage_seconds", "To make a swap ready beside generation.", tallies.stage, "policy"
    )
    yield histogram(
        "node_pause_seconds", "The engine stood still for a swap.", tallies.pause, "policy"
    )
    yield counter(
        "node_weights_failed_total", "Updates not reached.", failed, *("policy", "reason")
    )


def node_families(view: NodeView) -> Iterator[Family]:
    """Yield what a node tells."""
    for name, text, read in _LOAD:
        yield gauge(name, text, read(view.load))
    versions: dict[tuple[str, ...], float]
    versions = {(name,): float(v) for name, v in view.versions.items() if v is not None}
    yield gauge("node_version", "That its engine samples with.", versions, "policy")
    yield from view.counts


_LOAD: tuple[tuple[str, str, Callable[[RaasLoad], float]], ...] = (
    ("node_running_rollouts", "In progress.", lambda load: load.inflight_count),
    ("node_queued_rollouts", "That wait for a place or a version.", lambda load: load.queued_count),
    ("node_capacity_rollouts", "That it runs at once.", lambda load: load.capacity),
    ("node_engine_queued_requests", "In its engines.", lambda load: load.engine_queued_count),
    ("node_kv_used_ratio", "Of the KV cache.", lambda load: load.kv_fraction),
)
