"""The hub's tallies as metric families."""

from collections.abc import Iterator

from astraflow.core.evals import EvalResult, EvalRun
from astraflow.dataflow.tallies import Tallies
from astraflow.telemetry.families import Family, counter, gauge, histogram


def tally_families(tallies: Tallies) -> Iterator[Family]:
    """Yield what the hub counted since it began."""
    yield from _work(tallies)
    yield from _journal(tallies)
    yield from _weights(tallies)
    yield from eval_families(tallies.evals)


def _work(tallies: Tallies) -> Iterator[Family]:
    rollouts = {key: float(count) for key, count in tallies.rollouts.items()}
    tokens = {key: float(count) for key, count in tallies.tokens.items()}
    yield counter("rollouts_accepted_total", "By outcome.", rollouts, "purpose", "outcome")
    yield counter("sampled_tokens_total", "Of accepted rollouts.", tokens, "region")
    yield counter("sessions_lost_total", "Members that went silent.", tallies.lost_count)
    yield histogram(
        "rollout_ack_seconds",
        "From the arrival of a rollout until it is safe and acknowledged.",
        tallies.ack,
    )
    yield histogram(
        "trained_staleness_versions",
        "Versions between sampling and training, per rollout trained on.",
        tallies.staleness,
        "policy",
    )
    yield histogram(
        "batch_wait_seconds", "A trainer waited for a batch.", tallies.batch_wait, "policy"
    )
    yield histogram(
        "batch_train_seconds",
        "From a batch until its step was published.",
        tallies.batch_train,
        "policy",
    )


def _journal(tallies: Tallies) -> Iterator[Family]:
    yield histogram(
        "hub_journal_commit_seconds", "The journal took for a group of records.", tallies.commit
    )
    yield histogram("hub_journal_commit_records", "Records per group.", tallies.commit_size)


def _weights(tallies: Tallies) -> Iterator[Family]:
    nbytes = {key: float(count) for key, count in tallies.pulled_nbytes.items()}
    failed = {key: float(count) for key, count in tallies.failed_versions.items()}
    place = ("policy", "region")
    yield counter("weights_pulled_bytes_total", "Payload that nodes received.", nbytes, *place)
    yield histogram("weights_pull_seconds", "To pull and verify a version.", tallies.pull, *place)
    yield histogram(
        "weights_pause_seconds", "An engine stood still for a swap.", tallies.pause, *place
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
        "Of the newest finished evaluation.",
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
    yield gauge("eval_pass_at_k_ratio", "Unbiased.", passed, *labels, "k")
    versions = {
        (suite, policy): float(version)
        for suite, run in evals.items()
        for policy, version in run.versions.items()
    }
    yield gauge("eval_version", "That was evaluated.", versions, "suite", "policy")
