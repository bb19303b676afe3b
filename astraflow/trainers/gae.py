"""Generalised advantage estimation: advantages of tokens from the values of a critic."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Estimates:
    """What a critic's values say of a batch.

    Attributes:
        advantages: f64[K].
        returns: f64[K], what the values should have been.
    """

    advantages: np.ndarray
    returns: np.ndarray


def estimate(
    values: np.ndarray, rows: np.ndarray, rewards: np.ndarray, *, gamma: float, lam: float
) -> Estimates:
    """Return advantages and returns; a row is rewarded at its last token, and ends there.

    d_t = r_t + gamma V_(t+1) - V_t, A_t = d_t + gamma lam A_(t+1): GAE (arXiv 1506.02438, eq. 16).
    One step of the recursion is taken for all rows at once.

    Args:
        values: f[K], of the state in which each token was drawn.
        rows: i64[K], in which row each stands, rising.
        rewards: f[N], of each row.
        gamma: Discount.
        lam: 1: returns less values; 0: one step of temporal differences.

    Example:
        >>> found = estimate(
        ...     np.array([0.5, 0.25]), np.array([0, 0]), np.array([1.0]), gamma=1.0, lam=1.0
        ... )
        >>> found.advantages.tolist(), found.returns.tolist()
        ([0.5, 0.75], [1.0, 1.0])
    """
    counts = np.bincount(rows, minlength=len(rewards))
    ends = counts.cumsum()
    exact, advantages = values.astype(np.float64), np.zeros(len(values))
    following, coming = np.zeros(len(rewards)), np.zeros(len(rewards))
    for back in range(int(counts.max(initial=0))):
        some = np.flatnonzero(counts > back)
        at = ends[some] - 1 - back
        reward = rewards[some] if back == 0 else 0.0
        surprise = reward + gamma * following[some] - exact[at]
        coming[some] = surprise + gamma * lam * coming[some]
        advantages[at], following[some] = coming[some], exact[at]
    return Estimates(advantages=advantages, returns=advantages + exact)
