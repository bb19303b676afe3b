"""Rounding: values of f32 as bits of bf16."""

import numpy as np

from astraflow.codec import kernels


def round_bf16(values: np.ndarray, bits: np.ndarray) -> None:
    """Round to nearest, ties to even; not-a-number stays one.

    Few values are rounded without letting another thread have the interpreter meanwhile: waking
    it up, and waiting for it again, takes longer.

    Args:
        values: f32[n], contiguous.
        bits: u16[n], contiguous: where they go.
    """
    level = kernels.level()
    if level is not kernels.Level.NUMPY:
        kernels.loops.round_bf16(level, values, bits)
        return
    given = values.view(np.uint32)
    rounded = (given + 0x7FFF + (given >> 16 & 1)) >> 16
    bits[:] = np.where(np.isnan(values), given >> 16 | 0x40, rounded)
