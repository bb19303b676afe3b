from collections import Counter
from math import log2

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


def test_what_is_picked_more_often_weighs_less(used):
    groups = [used(1, 0.3), used(2, 0.1), used(3, 0.2)]
    whole = Prioritised(offset=0.0, beta=1.0)
    assert whole.loss_weights(groups, [0, 1]) == pytest.approx([1 / 3, 1])
    assert whole.loss_weights(groups, [0, 1, 2]) == [1.0, 1.0, 1.0]
    half = Prioritised(offset=0.0, beta=0.5)
    assert half.loss_weights(groups, [2]) == pytest.approx([2**-0.5])
    assert Prioritised(offset=0.0).loss_weights(groups, [0, 2]) == [1.0, 1.0]


def test_weighted_picks_are_on_average_what_picks_of_all_alike_are(used, dice):
    groups = [used(1, 0.3), used(2, 0.1), used(3, 0.2)]
    order, total = Prioritised(offset=0.0, beta=1.0), Counter()
    for _ in range(6000):
        (index,) = order.pick(groups, 1, dice)
        total[index] += order.loss_weights(groups, [index])[0]
    assert [total[index] / 1000 for index in range(3)] == pytest.approx([1, 1, 1], abs=0.1)


def test_beta_rises_to_1(used, dice):
    groups = [used(1, 0.2), used(2, 0.1)]
    order, betas = Prioritised(offset=0.0, beta=0.4, beta_batches=2), []
    for _ in range(4):
        order.pick(groups, 1, dice)
        betas.append(-log2(order.loss_weights(groups, [0])[0]))
    assert betas == pytest.approx([0.4, 0.7, 1.0, 1.0])


def test_repeated_prompts_are_unfit(fresh):
    groups = [fresh(1.0, prompt=name, number=n) for n, name in enumerate("aba")]
    assert DistinctPrompts().unfit(groups) == {2}


def test_too_many_groups_of_equal_rewards_are_unfit(fresh):
    groups = [fresh(1.0, 1.0), fresh(1.0, 0.0), fresh(0.0, 0.0), fresh(0.0, 1.0)]
    assert UsefulShare(min_share=0.75).unfit(groups) == [2]
    assert UsefulShare(min_share=0.5).unfit(groups) == []
    assert UsefulShare(min_share=1.0).unfit(groups) == [0, 2]
