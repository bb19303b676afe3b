"""Randomness by counter: the draw at a position depends on the seed and the position alone."""

import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MANTISSA_BITS = 24


def stream_of(seed: int) -> np.uint64:
    """Return the stream that a seed names; any int will do."""
    return _mixed(np.array([seed % 2**64], np.uint64) + _GAMMA)[0]


def uniforms(streams: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Draw one number per row.

    SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014) with
    the position as its counter.

    Args:
        streams: u64[n], from `stream_of`.
        positions: i64[n], of the token in its sequence.

    Returns:
        f32[n] in [0, 1).
    """
    bits = _mixed(streams + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    return (bits >> np.uint64(64 - _MANTISSA_BITS)).astype(np.float32) * np.float32(
        2.0**-_MANTISSA_BITS
    )


def _mixed(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))
