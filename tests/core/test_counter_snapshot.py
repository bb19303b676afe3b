from datetime import UTC, datetime

from astraflow.core.control.balance import CounterSnapshot, PolicyCounters, cost_of

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def mark(sums, **counts):
    return CounterSnapshot(
        time=NOW, policies={"solver": sums}, live_s=0.0, busy_s=0.0, accepted={}, **counts
    )


def test_cost_is_what_training_samples_for_a_rollout_that_is_kept():
    first = mark(PolicyCounters(), token_count=0, rollout_count=0)
    last = mark(
        PolicyCounters(entered=8, filtered=8),
        token_count=2600,
        rollout_count=20,
        eval_token_count=1000,
        eval_rollout_count=4,
    )
    assert cost_of("solver", first, last) == 1600 / 16 * 2


def test_nothing_kept_has_no_cost():
    none = mark(PolicyCounters(), token_count=0, rollout_count=0)
    assert cost_of("solver", none, mark(PolicyCounters(), token_count=80, rollout_count=8)) == 0.0
