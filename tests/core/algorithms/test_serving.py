from collections import Counter

import pytest

from astraflow.core.algorithms.serving import (
    DistinctPrompts,
    Latest,
    Prioritised,
    UniformReplay,
    UsefulShare,
)


def test_latest_picks_the_newest(used, dice):
    assert list(Latest().pick([used(n, 1.0) for n in range(4)], 2, dice)) == [2, 3]


def test_uniform_picks_all_alike_and_none_twice(used, dice):
    groups = [used(n, 1.0) for n in range(4)]
    counts = Counter()
    for _ in range(1000):
        picked = UniformReplay().pick(groups, 2, dice)
        assert len(set(picked)) == 2
        counts.update(picked)
    assert all(430 < counts[n] < 570 for n in range(4))


def test_prioritised_picks_what_teaches_more(used, dice):
    order = Prioritised(offset=0.0)
    groups = [used(1, 0.3, -0.3), used(2, 0.1, 0.1)]
    assert order.weight(groups[0]) == pytest.approx(3 * order.weight(groups[1]))
    first = Counter(order.pick(groups, 1, dice)[0] for _ in range(1000))
    assert 700 < first[0] < 800
    assert set(order.pick(groups, 2, dice)) == {0, 1}


def test_prioritised_prefers_what_is_less_stale(used):
    order = Prioritised(staleness_decay=0.5)
    assert order.weight(used(1, 0.3)) == 4 * order.weight(used(2, 0.3, staleness=2))


def test_repeated_prompts_are_unfit(fresh):
    groups = [fresh(1.0, prompt=name, number=n) for n, name in enumerate("aba")]
    assert DistinctPrompts().unfit(groups) == {2}


def test_too_many_groups_of_equal_rewards_are_unfit(fresh):
    groups = [fresh(1.0, 1.0), fresh(1.0, 0.0), fresh(0.0, 0.0), fresh(0.0, 1.0)]
    assert UsefulShare(min_share=0.75).unfit(groups) == [2]
    assert UsefulShare(min_share=0.5).unfit(groups) == []
    assert UsefulShare(min_share=1.0).unfit(groups) == [0, 2]
