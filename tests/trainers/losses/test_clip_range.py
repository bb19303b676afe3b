"""Where M2PO clips."""

import numpy as np
import pytest

from astraflow.config.recipe import Loss
from astraflow.trainers.losses import clip_range_of

M2PO = Loss(m2_threshold=0.04)


def brute_force(log_ratios, advantages, threshold):
    """Return the bound of |log r|, found by taking the largest away one by one; None: none."""
    squares = sorted(
        (
            float(gap) ** 2
            for gap, advantage in zip(log_ratios, advantages, strict=True)
            if gap * advantage > 0
        ),
        reverse=True,
    )
    for index in range(len(squares)):
        rest = squares[index:]
        if sum(rest) / len(rest) < threshold:
            return None if index == 0 else rest[0] ** 0.5
    return 0.0 if squares else None


@pytest.mark.parametrize("seed", range(20))
def test_range_is_that_of_the_search_one_by_one(seed):
    rng = np.random.default_rng(seed)
    gaps, advantages = rng.normal(size=300) * rng.random() * 0.8, rng.normal(size=300)
    found, bound = clip_range_of(M2PO, gaps, advantages), brute_force(gaps, advantages, 0.04)
    if bound is None:
        assert (found.low, found.high) == (pytest.approx(0.05), pytest.approx(21.0))
    else:
        assert found.low == pytest.approx(max(np.exp(-bound), 0.05))
        assert found.high == pytest.approx(min(np.exp(bound), 21.0))


def test_worked_example():
    # Squares that bind: .01, .04, .16, of mean .07; the first two have .025.
    found = clip_range_of(M2PO, np.array([0.1, -0.2, 0.4, 3.0]), np.array([1.0, -1.0, 2.0, -1.0]))
    assert found.low == pytest.approx(np.exp(-0.2))
    assert found.high == pytest.approx(np.exp(0.2))


def test_without_tokens_nothing_is_clipped():
    found = clip_range_of(M2PO, np.zeros(0), np.zeros(0))
    assert (found.low, found.high) == (pytest.approx(0.05), pytest.approx(21.0))


def test_the_recipe_decides_without_a_threshold():
    found = clip_range_of(Loss(clip_low=0.1, clip_high=0.3))
    assert (found.low, found.high) == (pytest.approx(0.9), pytest.approx(1.3))
