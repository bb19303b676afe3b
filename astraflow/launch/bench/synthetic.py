"""Two versions of weights, as a step of an optimizer makes them, from a seed.

fp32 master weights from N(0, 0.02), one step of Adam in its stationary state (betas .9 and .999:
steps from N(0, 1) times sqrt(0.1 / 1.9)), learning rate such that the wanted share of bf16 values
changes. Values of real training fit it closely (`benchmarks/corpus.py`).
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

_ADAM_STEP: Final = (0.1 / 1.9) ** 0.5
_PART: Final = 1 << 22
_RATE_SAMPLE: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Two versions of one tensor of bf16 values: u16[n] each."""

    old: np.ndarray
    new: np.ndarray
    changed_count: int

    @property
    def nbytes(self) -> int:
        """Of one copy."""
        return self.old.nbytes


def make_corpus(count: int, share: float, seed: int) -> Corpus:
    """Return two versions of `count` values, of which about a share differs."""
    old, new = np.empty((2, count), np.uint16)
    rate = _find_rate(share, seed)
    for number, first in enumerate(range(0, count, _PART)):
        rng = np.random.default_rng([seed, number])
        part = slice(first, min(first + _PART, count))
        master, steps = _draw(rng, part.stop - part.start)
        old[part], new[part] = _rounded(master), _stepped(master, steps, rate)
    return Corpus(old=old, new=new, changed_count=int(np.count_nonzero(old != new)))


def _rounded(values: np.ndarray) -> np.ndarray:
    """Round f32[n] to bf16, to the nearest even one: u16[n]."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _stepped(master: np.ndarray, steps: np.ndarray, rate: float) -> np.ndarray:
    return _rounded(master - np.float32(rate) * steps)


def _draw(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    master = rng.standard_normal(count, np.float32) * np.float32(0.02)
    return master, rng.standard_normal(count, np.float32) * np.float32(_ADAM_STEP)


def _find_rate(share: float, seed: int) -> float:
    """Return the learning rate with which a share of the values changes."""
    master, steps = _draw(np.random.default_rng([seed, 1 << 20]), _RATE_SAMPLE)
    old, low, high = _rounded(master), 1e-9, 1e-3
    for _ in range(30):
        rate = (low * high) ** 0.5
        if np.mean(old != _stepped(master, steps, rate)) < share:
            low = rate
        else:
            high = rate
    return high
