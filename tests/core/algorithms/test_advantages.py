from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.core.algorithms.advantages import advantages_of, overlong_penalty, stamp
from astraflow.core.samples import Row
from astraflow.core.settings import AdvantageSettings, Baseline, OverlongSettings

rewards = st.lists(st.floats(-10, 10), min_size=1, max_size=16)


def of(values, baseline=Baseline.GROUP, *, scale=False):
    made = AdvantageSettings(baseline=baseline, scale_by_std=scale)
    return advantages_of(np.array(values), made)


@settings(max_examples=50)
@given(rewards, st.booleans())
def test_advantages_of_a_group_sum_to_zero(values, scale):
    assert of(values, scale=scale).sum() == pytest.approx(0, abs=1e-4)


@settings(max_examples=50)
@given(rewards)
def test_leaving_one_out_compares_each_with_the_mean_of_the_others(values):
    for index, advantage in enumerate(of(values, Baseline.LEAVE_ONE_OUT)):
        others = values[:index] + values[index + 1 :]
        mean = sum(others) / len(others) if others else 0
        assert advantage == pytest.approx(values[index] - mean, abs=1e-9)


@pytest.mark.parametrize("baseline", [Baseline.GROUP, Baseline.LEAVE_ONE_OUT])
def test_equal_rewards_give_no_advantage(baseline):
    assert of([0.5] * 4, baseline, scale=True).tolist() == [0, 0, 0, 0]


def test_without_a_baseline_rewards_are_advantages():
    assert of([1.0, 0.0, 0.25], Baseline.NONE).tolist() == [1.0, 0.0, 0.25]


def test_scaled_advantages_have_unit_deviation():
    assert of([0.0, 0.0, 1.0, 1.0], scale=True).std() == pytest.approx(1, abs=1e-4)


def test_length_costs_nothing_then_more_and_more_then_all():
    costs = OverlongSettings(max_tokens=10, buffer_tokens=4, penalty=2.0)
    assert [overlong_penalty(count, costs) for count in (0, 6, 7, 9, 10, 99)] == [
        *(0.0, 0.0, 0.5, 1.5, 2.0, 2.0)
    ]


def test_rows_are_compared_with_those_of_the_same_agent(trajectory):
    def row(name, agent, reward):
        made = replace(trajectory(name), agent=agent)
        return Row(trajectory=made, rollout=None, reward=reward, min_version=0, max_version=0)

    rows = [
        *(row("a", "solver", 1.0), row("b", "solver", 0.0)),
        *(row("c", "solver/2", 1.0), row("d", "verifier", 0.0), row("e", "verifier", 1.0)),
    ]
    stamp(rows, AdvantageSettings())
    assert [each.advantage for each in rows] == [0.5, -0.5, 0.0, -0.5, 0.5]
    assert [each.group_mean for each in rows] == [0.5, 0.5, 1.0, 0.5, 0.5]
    assert [each.group_std for each in rows] == [0.5, 0.5, 0.0, 0.5, 0.5]
