"""Tallies: what the hub counts while it carries out effects, for its metrics.

They begin at 0 with the process, as Prometheus expects of counters. What the run knows itself is
not counted again here.
"""

from collections import Counter

from astraflow.core.effects import (
    CloseSession,
    Effect,
    EvalChanged,
    RecordBatch,
    RecordRollout,
    RecordVersion,
)
from astraflow.core.evals import EvalRun
from astraflow.core.versions import VersionReport, VersionState
from astraflow.dataflow.roster import Roster
from astraflow.telemetry.families import LONG_SECONDS, Histogram

_VERSIONS = (0, 1, 2, 3, 4, 6, 8, 16, 32)


class Tallies:
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
        self.staleness: dict[tuple[str], Histogram] = {}
        self.batch_wait: dict[tuple[str], Histogram] = {}
        self.batch_train: dict[tuple[str], Histogram] = {}
        self.pull: dict[tuple[str, str], Histogram] = {}
        self.pause: dict[tuple[str, str], Histogram] = {}
        self.pulled_nbytes = Counter[tuple[str, str]]()
        self.failed_versions = Counter[tuple[str, str]]()
        self.lost_count = 0
        self.evals: dict[str, EvalRun] = {}

    def committed(self, record_count: int, seconds: float) -> None:
        """Count a group of records that the journal holds."""
        self.commit.observe(seconds)
        self.commit_size.observe(record_count)

    def see(self, effect: Effect, roster: Roster) -> None:
        """Count what an effect tells; the roster says where members stand."""
        match effect:
            case RecordRollout():
                self._rollout(effect, roster.region_of(effect.member_id))
            case RecordBatch():
                self._batch(effect)
            case RecordVersion():
                self._version(effect.report, roster.region_of(effect.member_id))
            case CloseSession():
                self.lost_count += effect.is_lost
            case EvalChanged():
                if effect.eval_run.state.is_final:
                    self.evals[effect.eval_run.suite] = effect.eval_run
            case _:
                pass

    def _rollout(self, effect: RecordRollout, region: str) -> None:
        rollout = effect.rollout
        self.rollouts[effect.purpose, rollout.outcome] += 1
        self.tokens[(region,)] += sum(one.sampled_count for one in rollout.trajectories)

    def _batch(self, effect: RecordBatch) -> None:
        key = (effect.policy_id,)
        ages = self.staleness.setdefault(key, Histogram(_VERSIONS))
        for staleness, count in effect.staleness_counts.items():
            ages.observe(staleness, count)
        for held, name in ((self.batch_wait, "time/wait_s"), (self.batch_train, "time/train_s")):
            held.setdefault(key, Histogram(LONG_SECONDS)).observe(effect.metrics[name])

    def _version(self, report: VersionReport, region: str) -> None:
        key = (report.policy_id, region)
        if report.state is VersionState.FAILED and report.failure is not None:
            self.failed_versions[report.policy_id, report.failure.reason] += 1
        if report.state is not VersionState.LIVE:
            return
        self.pulled_nbytes[key] += report.pulled_nbytes
        if report.pull_duration is not None:
            _seconds(self.pull, key).observe(report.pull_duration.total_seconds())
        if report.pause_duration is not None:
            _seconds(self.pause, key).observe(report.pause_duration.total_seconds())


def _seconds(held: dict[tuple[str, str], Histogram], key: tuple[str, str]) -> Histogram:
    return held.setdefault(key, Histogram(LONG_SECONDS))
