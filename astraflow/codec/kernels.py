"""Kernels: the compiled loops of the codec at the level of this machine, or numpy.

All levels give the same bytes. `ASTRAFLOW_KERNELS` chooses one: `numpy`, `portable`, `avx2`,
`avx512` or `neon`; without it the last of these that the machine has is taken. Where the extension
could not be built numpy does its work, about thirty times slower, and a warning says so.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING

import structlog

from astraflow.core.errors import AstraflowError, Reason

if TYPE_CHECKING:
    from astraflow.codec import _kernels as loops
else:
    try:
        from astraflow.codec import _kernels as loops
    except ImportError:
        loops = None

__all__ = ["KernelLevel", "forced", "level", "levels", "loops"]


class KernelLevel(IntEnum):
    """Who does the work; those from PORTABLE on are compiled."""

    NUMPY = -1
    PORTABLE = 0
    AVX2 = 1
    AVX512 = 2
    NEON = 3


_forced: list[KernelLevel] = []


def level() -> KernelLevel:
    """Return who does the work.

    Raises:
        AstraflowError: INVALID_FIELD when `ASTRAFLOW_KERNELS` names no level of this machine.
    """
    return _forced[-1] if _forced else _chosen()


def levels() -> tuple[KernelLevel, ...]:
    highest = KernelLevel.NUMPY if loops is None else loops.highest_level()
    if highest == KernelLevel.NEON:
        return (KernelLevel.NUMPY, KernelLevel.PORTABLE, KernelLevel.NEON)
    return tuple(each for each in KernelLevel if each <= highest)


@contextmanager
def forced(chosen: KernelLevel) -> Generator[None]:
    """Have the work done at one level of `levels()`, in all threads, for tests."""
    _forced.append(chosen)
    try:
        yield
    finally:
        _forced.pop()


@cache
def _chosen() -> KernelLevel:
    name = os.environ.get("ASTRAFLOW_KERNELS", "").upper()
    if name:
        if name not in [each.name for each in levels()]:
            names = ", ".join(each.name.lower() for each in levels())
            raise AstraflowError(
                Reason.INVALID_FIELD, f"ASTRAFLOW_KERNELS must be one of {names}, or unset"
            )
        return KernelLevel[name]
    if loops is None:
        structlog.get_logger().warning(
            "weights are coded by numpy, slowly: install a C compiler and astraflow again"
        )
    return levels()[-1]
