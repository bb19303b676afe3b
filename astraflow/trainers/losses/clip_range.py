"""Where ratios are clipped: as the recipe says, or as M2PO finds it for a batch."""

from dataclasses import dataclass
from math import exp, sqrt
from typing import Final

import numpy as np

from astraflow.config.recipe import Loss

# What M2PO clips at where nothing has to be (the published defaults).
_WIDEST_LOW: Final = 0.95
_WIDEST_HIGH: Final = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipRange:
    """The ratios between which a token's gradient is kept.

    Attributes:
        low: Smallest.
        high: Largest.
    """

    low: float
    high: float


def clip_range_of(
    settings: Loss, log_ratios: np.ndarray | None = None, advantages: np.ndarray | None = None
) -> ClipRange:
    """Return the range for a batch.

    Args:
        settings: Of the recipe.
        log_ratios: f[K], of all tokens of the batch; with `m2_threshold` only.
        advantages: f[K], theirs.
    """
    threshold = settings.m2_threshold
    if threshold is None or log_ratios is None or advantages is None:
        return ClipRange(low=1 - settings.clip_low, high=1 + settings.clip_high)
    return _second_moment_range(log_ratios, advantages, threshold)


def _second_moment_range(
    log_ratios: np.ndarray, advantages: np.ndarray, threshold: float
) -> ClipRange:
    """Return the widest range that keeps the second moment of what it does not clip below a bound.

    M2PO (arXiv 2510.01161): only tokens whose clip would bind count, those with A > 0, r > 1 or
    A < 0, r < 1. Of their squared log-ratios the largest go until the mean of the rest is below the
    threshold; the root of the largest that stays bounds the log-ratio on both sides.
    """
    binds = ((advantages > 0) & (log_ratios > 0)) | ((advantages < 0) & (log_ratios < 0))
    squares = np.sort(np.square(log_ratios[binds], dtype=np.float64))
    means = squares.cumsum() / np.arange(1, len(squares) + 1)
    kept = squares[means < threshold]
    if len(kept) == len(squares):
        return ClipRange(low=1 - _WIDEST_LOW, high=1 + _WIDEST_HIGH)
    bound = sqrt(kept[-1]) if len(kept) else 0.0
    return ClipRange(
        low=max(exp(-bound), 1 - _WIDEST_LOW), high=min(exp(min(bound, 10.0)), 1 + _WIDEST_HIGH)
    )
