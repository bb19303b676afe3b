"""GAE against the sums of its definition."""

import numpy as np
import pytest

from astraflow.trainers.critic import estimate


def by_definition(values, reward, gamma, lam):
    """Return the advantages of one row, each as the sum over all that follows it."""
    count = len(values)
    rewards = [0.0] * (count - 1) + [reward]
    after = [*values[1:], 0.0]
    surprises = [rewards[t] + gamma * after[t] - values[t] for t in range(count)]
    return [
        sum((gamma * lam) ** (s - t) * surprises[s] for s in range(t, count)) for t in range(count)
    ]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (1.0, 0.5)])
def test_rows_of_any_length_get_what_the_definition_says(gamma, lam):
    rng = np.random.default_rng(0)
    lengths, rewards = [3, 1, 0, 7, 2], rng.normal(size=5)
    rows = np.repeat(np.arange(5), lengths)
    values = rng.normal(size=13)
    advantages, returns = estimate(values, rows, rewards, gamma=gamma, lam=lam)
    wanted = np.concatenate(
        [by_definition(values[rows == row], rewards[row], gamma, lam) for row in range(5)]
    )
    np.testing.assert_allclose(advantages, wanted, rtol=1e-9)
    np.testing.assert_allclose(returns, wanted + values, rtol=1e-9)


def test_without_values_every_token_gets_the_discounted_reward():
    advantages, _ = estimate(
        np.zeros(3), np.zeros(3, np.int64), np.array([2.0]), gamma=0.5, lam=1.0
    )
    assert advantages.tolist() == [0.5, 1.0, 2.0]


def test_rewards_of_tokens_count_beside_that_of_the_row():
    advantages, _ = estimate(
        np.zeros(3),
        np.zeros(3, np.int64),
        np.array([2.0]),
        gamma=0.5,
        lam=1.0,
        token_rewards=np.array([0.0, 4.0, 0.0]),
    )
    assert advantages.tolist() == [2.5, 5.0, 2.0]


def test_no_tokens_have_no_advantages():
    advantages, _ = estimate(np.zeros(0), np.zeros(0, np.int64), np.zeros(2), gamma=1.0, lam=1.0)
    assert not len(advantages)
