"""Checks of arrays in one pass; `rollouts.py` does the same in numpy where this was not built."""

import numpy as np

def is_sound(
    tokens: np.ndarray,
    sampled_mask: np.ndarray,
    logprobs: np.ndarray,
    branch_offset: int,
    sampled_count: int,
    /,
) -> bool: ...
