"""Peers: what the ranks of one trainer have to agree on in a step; most trainers are one rank."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager

import numpy as np

from astraflow.core.errors import AstraflowError


class Peers:
    """The ranks of a trainer, as one of them sees them: here it is alone, see `Ranks` for several.

    Every rank makes the same calls.
    """

    def all_gather(self, values: np.ndarray) -> np.ndarray:
        """Return the values of all ranks, by rank: f[sum of K]."""
        return values

    def all_reduce_max(self, count: int) -> int:
        """Return the largest number that a rank has."""
        return count

    def all_reduce_sum(self, value: float) -> float:
        """Return the sum over all ranks."""
        return value

    def agree(self, problem: Exception | None) -> None:
        """Raise on every rank what went wrong on one of them, before they wait for each other."""
        if problem is not None:
            raise problem

    def merged(self, metrics: Mapping[str, float], *, weight: float) -> Mapping[str, float]:
        """Return means of all ranks' metrics, by weight; of a name that ends with max the most."""
        del weight
        return metrics


ALONE = Peers()


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
