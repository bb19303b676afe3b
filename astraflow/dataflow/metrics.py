"""What the hub says of itself: metric families when a scraper asks, `status.json` at the end.

All of it is read from what status, books and the hub's own counters say;
`docs/reference/metrics.md` lists it.
"""

import asyncio
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from astraflow.core.members import MemberRole, MemberState, MemberStatus, RaasLoad
from astraflow.core.status import (
    FailureReport,
    LedgerAccount,
    PolicyStatus,
    RolloutPlace,
    RunState,
    RunStatus,
)
from astraflow.dataflow.counters import counter_families
from astraflow.dataflow.hub import Hub
from astraflow.telemetry.metrics import Family, counter, gauge

LIMIT_S = 0.05


@dataclass(slots=True, kw_only=True)
class LoopStats:
    """How the event loop fared.

    Attributes:
        tick_count: Looks taken.
        max_lag_s: Longest that a due look had to wait, by the wall clock: waiting for a
            core is in it.
        max_cpu_s: The same, but at most the CPU that the loop's thread used since the look
            before: an upper bound on one stretch of work.
        slow_count: Looks later than the limit of 50 ms.
    """

    tick_count: int = 0
    max_lag_s: float = 0.0
    max_cpu_s: float = 0.0
    slow_count: int = 0


class LoopProbe:
    """Takes a look every so often and notes how late it was.

    Attributes:
        stats: What was seen so far.
    """

    def __init__(self, *, interval_s: float = 0.1) -> None:
        self.stats = LoopStats()
        self._interval_s = interval_s
        self._handle: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._cpu = 0.0

    def __enter__(self) -> Self:
        self._schedule()
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            self._handle.cancel()

    def _schedule(self) -> None:
        loop = asyncio.get_running_loop()
        self._due = loop.time() + self._interval_s
        self._cpu = time.thread_time()
        self._handle = loop.call_at(self._due, self._sample)

    def _sample(self) -> None:
        lag = max(0.0, asyncio.get_running_loop().time() - self._due)
        used = time.thread_time() - self._cpu
        stats = self.stats
        stats.tick_count += 1
        stats.max_lag_s = max(stats.max_lag_s, lag)
        stats.max_cpu_s = max(stats.max_cpu_s, min(lag, used))
        stats.slow_count += lag > LIMIT_S
        self._schedule()


_PLACES = tuple(place for place in RolloutPlace if place is not RolloutPlace.DROPPED)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubView:
    """The hub at one moment, as it tells it to a scraper."""

    status: RunStatus
    accounts: tuple[LedgerAccount, ...]
    counts: tuple[Family, ...]

    @classmethod
    def of(cls, hub: Hub, probe: LoopProbe) -> Self:
        """Return a hub as it is; on its event loop."""
        return cls(
            status=hub.status(),
            accounts=hub.run.accounts(),
            counts=(*counter_families(hub.counters), *hub_families(hub, probe.stats)),
        )

    def families(self) -> Iterator[Family]:
        """Yield the families; on any thread."""
        yield from run_families(self.status)
        yield from book_families(self.accounts)
        yield from policy_families(self.status.policies)
        yield from pool_families(self.status)
        yield from self.counts


def hub_families(hub: Hub, stats: LoopStats) -> Iterator[Family]:
    """Yield what is said of the hub itself, and of the size of the pool."""
    advice = hub.scale_advice()
    yield gauge("scale_nodes", "Live or joining, without those that drain.", advice.member_count)
    yield gauge(
        "scale_target_nodes", "As many nodes as there should be.", advice.target_member_count
    )
    yield gauge(
        "pool_busy_ratio",
        "Of what the pool can do, what it is asked for; over the scaling window.",
        advice.balance.busy_fraction,
    )
    yield counter("hub_events_total", "Events decided.", hub.event_count)
    yield counter("hub_journal_bytes_total", "Written to the journal.", hub.commits.nbytes)
    yield gauge(
        "hub_loop_lag_max_seconds",
        "Longest that a due look at the event loop had to wait.",
        stats.max_lag_s,
    )
    yield counter(
        "hub_loop_slow_total", "Looks at the event loop that came 50 ms late.", stats.slow_count
    )
    if hub.payloads is not None:
        named, removed = hub.run.payload_names, hub.payloads.removed_count
        yield gauge("payloads", "In the payload store, for rollouts of use.", len(named))
        yield counter("payloads_removed_total", "From the payload store.", removed)


def run_families(status: RunStatus) -> Iterator[Family]:
    """Yield what is said of the whole run."""
    states = {(state.value,): float(state is status.state) for state in RunState}
    yield gauge("run_state", "1 for the state that the run is in.", states, "state")
    yield gauge("run_start_time_seconds", "Unix time.", status.start_time.timestamp())
    share = status.failures.recent_share
    yield gauge(
        "rollouts_failed_ratio",
        "Of the last 128 training rollouts: a workflow, scorer or environment failed.",
        share,
    )
    yield gauge("dead_letters", "Prompts that are no longer issued.", status.dead_letter_count)
    epochs = {(name,): float(count) for name, count in status.epochs.items()}
    yield gauge("data_set_epochs", "Passes completed.", epochs, "data_set")


def book_families(accounts: tuple[LedgerAccount, ...]) -> Iterator[Family]:
    """Yield the books of every policy."""

    def of(name: str) -> dict[tuple[str, ...], float]:
        return {(each.policy_id,): getattr(each, name) for each in accounts}

    issued, drops = of("issued_count"), Counter[tuple[str, ...]]()
    for each in accounts:
        for drop in each.drops:
            drops[each.policy_id, drop.reason, drop.filter] += drop.count
    places = {
        (each.policy_id, place.value): float(getattr(each, f"{place}_count"))
        for each in accounts
        for place in _PLACES
    }
    yield counter("rollouts_issued_total", "Entered in the books.", issued, "policy")
    yield gauge("rollouts", "By place; each is in one.", places, "policy", "place")
    yield counter(
        "rollouts_dropped_total",
        "Dropped, by reason and filter.",
        drops,
        "policy",
        "reason",
        "filter",
    )
    for name, text in _BOOKS:
        yield counter(f"rollouts_{name}_total", text, of(f"{name}_count"), "policy")
    balanced: dict[tuple[str, ...], float]
    balanced = {(each.policy_id,): float(each.is_balanced) for each in accounts}
    yield gauge(
        "books_balanced",
        "1 while issued = live + trained + dropped; alert on 0.",
        balanced,
        "policy",
    )


_BOOKS = (
    ("reissued", "Asked for again after an attempt that failed."),
    ("duplicate", "Came again after they were accepted."),
    ("replayed", "Uses after the first."),
    ("rolled_back", "Returned by a trainer that came back at an older step."),
)


def policy_families(policies: tuple[PolicyStatus, ...]) -> Iterator[Family]:
    """Yield the columns of the policies."""

    def of(read: Callable[[PolicyStatus], float | None]) -> dict[tuple[str, ...], float]:
        read_all = ((each.policy_id, read(each)) for each in policies)
        return {(name,): float(value) for name, value in read_all if value is not None}

    for name, text, read in _POLICY:
        yield gauge(name, text, of(read), "policy")
    steps = of(lambda each: each.step)
    yield counter("steps_total", "Optimizer steps acknowledged.", steps, "policy")
    recent = {
        (each.policy_id, str(age)): float(count)
        for each in policies
        for age, count in each.staleness_counts.items()
    }
    yield gauge(
        "window_staleness_rollouts",
        "Trained on in the last batches, by staleness in versions.",
        recent,
        *("policy", "staleness"),
    )
    step: dict[tuple[str, ...], float] = {
        (each.policy_id, name): v for each in policies for name, v in each.metrics.items()
    }
    yield gauge(
        "batch_metric", "Of the last batch, by its name in metrics.jsonl.", step, "policy", "metric"
    )


_POLICY: tuple[tuple[str, str, Callable[[PolicyStatus], float | None]], ...] = (
    ("version", "Newest published.", lambda p: p.version),
    ("open_groups", "Issued and not trained on yet.", lambda p: p.open_group_count),
    ("open_groups_limit", "How many may be open.", lambda p: p.max_open_group_count),
    ("buffer_groups", "Whole groups that wait for the trainer.", lambda p: p.buffer_group_count),
    ("buffer_bytes", "Of their tokens and columns.", lambda p: p.buffer_nbytes),
    ("replay_rollouts", "That can be trained on again.", lambda p: p.replay_count),
    ("replay_bytes", "Of their tokens and columns.", lambda p: p.replay_nbytes),
    ("leased_batches", "In the trainer's hands.", lambda p: p.leased_batch_count),
    ("trainer_wait_ratio", "Share of time without a batch, lately.", lambda p: p.wait_fraction),
    ("trained_tokens_per_second", "Sampled ones, lately.", lambda p: p.tokens_per_s),
    ("reward_mean", "Over the last rollouts.", lambda p: p.mean_reward),
)


def pool_families(status: RunStatus) -> Iterator[Family]:
    """Yield who takes part, by region, and how far behind each node is."""
    members = Counter[tuple[str, ...]]()
    for member in status.members:
        members[member.role, member.state, member.region] += 1
    for state in MemberState:
        members.setdefault((MemberRole.RAAS, state, ""), 0)
    yield gauge("members", "Live sessions.", members, "role", "state", "region")
    nodes = [member for member in status.members if member.role is MemberRole.RAAS]
    for name, text, read in _POOL:
        sums = defaultdict[tuple[str, ...], float](float)
        for node in nodes:
            sums[(node.region,)] += read(node)
        yield gauge(name, text, sums, "region")
    newest = {policy.policy_id: policy.version for policy in status.policies}
    lag: dict[tuple[str, ...], float] = {
        (node.name, policy): float(head - node.versions.get(policy, -1))
        for node in nodes
        for policy, head in newest.items()
        if head is not None
    }
    yield gauge("node_version_lag", "Versions behind the newest.", lag, "node", "policy")


def _load(member: MemberStatus) -> RaasLoad:
    return member.load if isinstance(member.load, RaasLoad) else RaasLoad()


_POOL: tuple[tuple[str, str, Callable[[MemberStatus], float]], ...] = (
    ("pool_credit_rollouts", "Rollouts that nodes take at once.", lambda m: m.max_outstanding),
    ("pool_outstanding_rollouts", "Asked for, not answered.", lambda m: m.outstanding_count),
    (
        "pool_running_rollouts",
        "In progress, by the nodes' reports.",
        lambda m: _load(m).inflight_count,
    ),
    ("pool_queued_rollouts", "That wait at a node.", lambda m: _load(m).queued_count),
    ("pool_tokens_per_second", "Sampled, by the nodes' reports.", lambda m: _load(m).tokens_per_s),
    ("pool_relay_bytes_per_second", "Weights passed on.", lambda m: _load(m).relay_bytes_per_s),
)


class Account:
    """Adds up what a hub did since this was made."""

    def __init__(self, hub: Hub, probe: LoopProbe) -> None:
        self._hub = hub
        self._probe = probe
        self._start = (time.monotonic(), time.process_time())

    def to_json(self) -> dict[str, Any]:
        """Return the run, its books, its members and how the hub fared."""
        directory, run = self._hub.directory, self._hub.run
        status = self._hub.status()
        return {
            "run_id": status.run_id,
            "state": status.state,
            "failure": None if status.failure is None else asdict(status.failure),
            "failures": _failures_row(status.failures),
            "start_time": status.start_time.isoformat(),
            "end_time": status.server_time.isoformat(),
            "epochs": dict(status.epochs),
            "dead_letter_count": status.dead_letter_count,
            "policies": [asdict(policy) for policy in status.policies],
            "books": [asdict(book) | {"balanced": book.is_balanced} for book in run.accounts()],
            "members": directory.history.rows(status.members),
            "hub": self._hub_row(),
        }

    def _hub_row(self) -> dict[str, Any]:
        wall_s = max(1e-9, time.monotonic() - self._start[0])
        cpu_s = time.process_time() - self._start[1]
        return {
            "event_count": self._hub.event_count,
            "max_event_s": self._hub.max_apply_s,
            "wall_s": wall_s,
            "cpu_s": cpu_s,
            "idle_fraction": max(0.0, 1.0 - cpu_s / wall_s),
            "max_rss_nbytes": _peak_rss_nbytes(),
            "loop": asdict(self._probe.stats),
        }


def _failures_row(report: FailureReport) -> dict[str, Any]:
    causes = [
        {
            "cause": each.cause,
            "count": each.count,
            "reason": each.last.reason,
            "message": each.last.message,
            "traceback": each.last.traceback,
            "first_time": each.first_time.isoformat(),
            "last_time": each.last_time.isoformat(),
        }
        for each in report.causes
    ]
    return {
        "finished_count": report.finished_count,
        "failed_count": report.failed_count,
        "failed_share": round(report.failed_share, 4),
        "causes": causes,
    }


def _peak_rss_nbytes() -> int:
    """Return the most memory that this process had resident.

    From VmHWM of /proc where there is one (gVisor has none): what getrusage(2) tells begins on
    Linux with what the parent had when it forked.
    """
    status = Path("/proc/self/status")
    if status.exists():
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        if (most := lines.get("VmHWM")) is not None:
            return int(most.split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
