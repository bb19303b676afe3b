import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.core.advantages import group_relative

rewards = st.lists(st.floats(-10, 10), min_size=1, max_size=16)


@settings(max_examples=50)
@given(rewards, st.booleans())
def test_advantages_of_a_group_sum_to_zero(values, scale):
    assert group_relative(np.array(values), scale_by_std=scale).sum() == pytest.approx(0, abs=1e-4)


def test_equal_rewards_give_no_advantage():
    assert group_relative(np.full(4, 0.7), scale_by_std=True).tolist() == [0, 0, 0, 0]


def test_scaled_advantages_have_unit_deviation():
    advantages = group_relative(np.array([0.0, 0.0, 1.0, 1.0]), scale_by_std=True)
    assert advantages.std() == pytest.approx(1, abs=1e-4)
