"""Counters: what the hub counts while it carries out effects, as metric families.

They begin at 0 with the process, as Prometheus expects of counters. What the run knows itself is
not counted again here.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import timedelta
from functools import partial

from astraflow.core.effects import (
    CloseSession,
    Effect,
    EvalChanged,
    RecordBatch,
    RecordRollout,
    RecordVersion,
)
from astraflow.core.evals import EvalResult, EvalRun
from astraflow.core.versions import VersionReport, VersionState
from astraflow.dataflow.members import MemberHistory
from astraflow.telemetry.metrics import LONG_SECONDS, Family, Histogram, counter, gauge, histogram

_VERSIONS = partial(Histogram, (0, 1, 2, 3, 4, 6, 8, 16, 32))
_LONG = partial(Histogram, LONG_SECONDS)


class HubCounters:
    """Counts since the process began.

    Attributes:
        ack: Seconds from the arrival of a rollout until it is safe and acknowledged.
        commit: Seconds that the journal took for a group of records.
        commit_size: Records per group.
        rollouts: Accepted, by purpose and outcome.
        tokens: Sampled ones in these, by the region of who sampled.
        staleness: Of what was trained on, in versions, by policy.
        batch_wait: Seconds that a trainer waited for a batch, by policy.
        batch_train: Seconds from a batch until its version was published, by policy.
        pull: Seconds to pull and verify a version, by policy and region.
        pause: Seconds that an engine stood still for a swap, by policy and region.
        pulled_nbytes: Payload that nodes received, by policy and region.
        failed_versions: By policy and reason.
        lost_count: Sessions that ended because the member went silent.
        evals: The newest finished one of each suite.
    """

    def __init__(self) -> None:
        self.ack = Histogram()
        self.commit = Histogram()
        self.commit_size = Histogram((1, 2, 4, 8, 16, 32, 64, 128, 256))
        self.rollouts = Counter[tuple[str, str]]()
        self.tokens = Counter[tuple[str]]()
        self.staleness = defaultdict[tuple[str], Histogram](_VERSIONS)
        self.batch_wait = defaultdict[tuple[str], Histogram](_LONG)
        self.batch_train = defaultdict[tuple[str], Histogram](_LONG)
        self.pull = defaultdict[tuple[str, str], Histogram](_LONG)
        self.pause = defaultdict[tuple[str, str], Histogram](_LONG)
        self.pulled_nbytes = Counter[tuple[str, str]]()
        self.failed_versions = Counter[tuple[str, str]]()
        self.lost_count = 0
        self.evals: dict[str, EvalRun] = {}

    def committed(self, record_count: int, seconds: float) -> None:
        self.commit.observe(seconds)
        self.commit_size.observe(record_count)

    def see(self, effect: Effect, history: MemberHistory) -> None:
        """Count what an effect tells, but a rollout; the history says where members stand."""
        match effect:
            case RecordBatch():
                self._batch(effect)
            case RecordVersion():
                self._version(effect.report, history.region_of(effect.member_id))
            case CloseSession():
                self.lost_count += effect.is_lost
            case EvalChanged():
                if effect.eval_run.state.is_final:
                    self.evals[effect.eval_run.suite] = effect.eval_run
            case _:
                pass

    def rollout(self, effect: RecordRollout, region: str) -> None:
        """Count a rollout of a member that stands in a region."""
        rollout = effect.rollout
        self.rollouts[effect.purpose, rollout.outcome] += 1
        self.tokens[(region,)] += sum([one.sampled_count for one in rollout.trajectories])

    def _batch(self, effect: RecordBatch) -> None:
        key = (effect.policy_id,)
        ages = self.staleness[key]
        for staleness, count in effect.staleness_counts.items():
            ages.observe(staleness, count)
        self.batch_wait[key].observe(effect.metrics["time/wait_s"])
        self.batch_train[key].observe(effect.metrics["time/train_s"])

    def _version(self, report: VersionReport, region: str) -> None:
        key = (report.policy_id, region)
        if report.state is VersionState.FAILED and report.failure is not None:
            self.failed_versions[report.policy_id, report.failure.reason] += 1
        if report.state is not VersionState.LIVE:
            return
        self.pulled_nbytes[key] += report.pulled_nbytes
        for seconds, span in (
            (self.pull, report.pull_duration),
            (self.pause, report.pause_duration),
        ):
            # A clock that was set back meanwhile has measured nothing.
            if span is not None and span >= timedelta():
                seconds[key].observe(span.total_seconds())


def counter_families(counters: HubCounters) -> Iterator[Family]:
    yield from _work(counters)
    yield from _journal(counters)
    yield from _weights(counters)
    yield from eval_families(counters.evals)


def _work(counters: HubCounters) -> Iterator[Family]:
    rollouts = {key: float(count) for key, count in counters.rollouts.items()}
    tokens = {key: float(count) for key, count in counters.tokens.items()}
    yield counter(
        "rollouts_accepted_total",
        "By outcome; rate it for rollouts per second.",
        rollouts,
        "purpose",
        "outcome",
    )
    yield counter(
        "sampled_tokens_total",
        "Of accepted rollouts; rate it for tokens per second.",
        tokens,
        "region",
    )
    yield counter("sessions_lost_total", "Members that went silent.", counters.lost_count)
    yield histogram(
        "rollout_ack_seconds",
        "From the arrival of a rollout until it is safe and acknowledged.",
        counters.ack,
    )
    yield histogram(
        "trained_staleness_versions",
        "Versions between sampling and training, per rollout trained on.",
        counters.staleness,
        "policy",
    )
    yield histogram(
        "batch_wait_seconds", "A trainer waited for a batch.", counters.batch_wait, "policy"
    )
    yield histogram(
        "batch_train_seconds",
        "From a batch until its step was published.",
        counters.batch_train,
        "policy",
    )


def _journal(counters: HubCounters) -> Iterator[Family]:
    yield histogram(
        "hub_journal_commit_seconds", "The journal took for a group of records.", counters.commit
    )
    yield histogram("hub_journal_commit_records", "Records per group.", counters.commit_size)


def _weights(counters: HubCounters) -> Iterator[Family]:
    nbytes = {key: float(count) for key, count in counters.pulled_nbytes.items()}
    failed = {key: float(count) for key, count in counters.failed_versions.items()}
    place = ("policy", "region")
    yield counter("weights_pulled_bytes_total", "Payload that nodes received.", nbytes, *place)
    yield histogram("weights_pull_seconds", "To pull and verify a version.", counters.pull, *place)
    yield histogram(
        "weights_pause_seconds", "An engine stood still for a swap.", counters.pause, *place
    )
    yield counter(
        "weights_failed_total", "Updates that did not go live.", failed, "policy", "reason"
    )


def eval_families(evals: dict[str, EvalRun]) -> Iterator[Family]:
    """Yield the newest results of each suite; the mean over its data sets has the name `all`."""
    results = [
        (suite, one)
        for suite, run in evals.items()
        for one in (*run.results, *(() if run.overall is None else (run.overall,)))
    ]

    def key(suite: str, one: EvalResult) -> tuple[str, str]:
        return suite, one.data_set or "all"

    labels = ("suite", "data_set")
    yield gauge(
        "eval_reward_mean",
        "Of the newest finished evaluation; `all` is the mean over data sets.",
        {key(suite, one): one.mean_reward for suite, one in results},
        *labels,
    )
    yield gauge(
        "eval_avg_at_k_ratio",
        "Share of correct rollouts.",
        {key(suite, one): one.avg_at_k for suite, one in results},
        *labels,
    )
    passed = {
        (*key(suite, one), str(k)): share
        for suite, one in results
        for k, share in one.pass_at_k.items()
    }
    yield gauge(
        "eval_pass_at_k_ratio", "Chance that one of k is right, unbiased.", passed, *labels, "k"
    )
    versions = {
        (suite, policy): float(version)
        for suite, run in evals.items()
        for policy, version in run.versions.items()
    }
    yield gauge("eval_version", "That was evaluated.", versions, "suite", "policy")
