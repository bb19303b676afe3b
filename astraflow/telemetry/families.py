"""Metric families: what a process can tell of itself, before anybody asks in which format.

A family is a snapshot: it is built when a scraper asks, from numbers that the process has anyway.
Names follow Prometheus: the prefix `astraflow_`, base units (`_seconds`, `_bytes`), `_total` on
counters. Label values come from bounded sets: policies, nodes, regions, reasons.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Final

# From the fastest acknowledgement to the slowest one that anybody waits for.
SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
# From a swap to a long step.
LONG_SECONDS: Final = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Kind(StrEnum):
    """What a family's numbers are."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """A histogram at one moment.

    Attributes:
        bounds: Upper bounds, rising; a last one of infinity is understood.
        counts: At most each bound, so rising; the last one is of all.
        total: Sum of the values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Numbers under one name.

    Attributes:
        name: As scraped.
        kind: What they are.
        help: One sentence.
        labels: Names of the labels.
        values: By the values of the labels.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    values: Mapping[tuple[str, ...], float | Buckets]


Read = Callable[[], Iterable[Family]]


class Histogram:
    """Counts values by size; for one writer, and readers on any thread.

    Example:
        >>> waits = Histogram((1.0, 2.0))
        >>> for seconds in (0.5, 2.0, 9.0):
        ...     waits.observe(seconds)
        >>> waits.read().counts
        (1, 2, 3)
    """

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        """Begin empty, with rising upper bounds."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value, so many times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._total += value * count

    def read(self) -> Buckets:
        """Return what was counted so far."""
        counts = tuple(accumulate(tuple(self._counts)))
        return Buckets(bounds=self._bounds, counts=counts, total=self._total)


def gauge(
    name: str, help_text: str, values: float | Mapping[tuple[str, ...], float], *labels: str
) -> Family:
    """Return numbers that rise and fall; one number alone has no labels."""
    return _family(Kind.GAUGE, name, help_text, values, labels)


def counter(
    name: str, help_text: str, values: float | Mapping[tuple[str, ...], float], *labels: str
) -> Family:
    """Return numbers that rise until the process ends; their name ends in `_total`."""
    return _family(Kind.COUNTER, name, help_text, values, labels)


def histogram(
    name: str, help_text: str, values: Histogram | Mapping[tuple[str, ...], Histogram], *labels: str
) -> Family:
    """Return values by size."""
    held = {(): values} if isinstance(values, Histogram) else values
    return _family(
        Kind.HISTOGRAM, name, help_text, {key: one.read() for key, one in held.items()}, labels
    )


def _family(
    kind: Kind,
    name: str,
    help_text: str,
    values: float | Mapping[tuple[str, ...], float] | Mapping[tuple[str, ...], Buckets],
    labels: tuple[str, ...],
) -> Family:
    held = values if isinstance(values, Mapping) else {(): values}
    return Family(name=f"astraflow_{name}", kind=kind, help=help_text, labels=labels, values=held)
