"""Peers: what the ranks of one trainer have to agree on in a step; most trainers are one rank."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from astraflow.core.errors import AstraflowError


class Peers(Protocol):
    """The ranks of a trainer, as one of them sees them; every rank makes the same calls."""

    def all_gather(self, values: np.ndarray) -> np.ndarray:
        """Return the values of all ranks, by rank: f[sum of K]."""
        ...

    def all_reduce_max(self, count: int) -> int:
        """Return the largest number that a rank has."""
        ...

    def all_reduce_sum(self, value: float) -> float:
        """Return the sum over all ranks."""
        ...

    def agree(self, problem: Exception | None) -> None:
        """Raise on every rank what went wrong on one of them, before they wait for each other."""
        ...

    def merged(self, metrics: Mapping[str, float], *, weight: float) -> Mapping[str, float]:
        """Return means of all ranks' metrics, by weight; of a name that ends with max the most."""
        ...


class Alone:
    """The peers of a rank that has none."""

    def all_gather(self, values: np.ndarray) -> np.ndarray:
        """Return the values."""
        return values

    def all_reduce_max(self, count: int) -> int:
        """Return the number."""
        return count

    def all_reduce_sum(self, value: float) -> float:
        """Return the value."""
        return value

    def agree(self, problem: Exception | None) -> None:
        """Raise what went wrong."""
        if problem is not None:
            raise problem

    def merged(self, metrics: Mapping[str, float], *, weight: float) -> Mapping[str, float]:
        """Return the metrics."""
        del weight
        return metrics


ALONE = Alone()


@contextmanager
def agreeing(peers: Peers) -> Generator[None]:
    """Have a block fail on all ranks when it fails on one of them, before they wait for each other.

    Raises:
        AstraflowError: That of the block, or of the lowest rank where it failed.
    """
    try:
        yield
    except AstraflowError as error:
        peers.agree(error)
        raise
    peers.agree(None)
