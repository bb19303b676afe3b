"""The metrics of a process: families, and how Prometheus reads them over HTTP.

Formatting and HTTP run on threads of their own; nothing is counted until a scraper asks.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from socket import AF_INET6
from socketserver import ThreadingMixIn
from threading import Thread
from typing import TYPE_CHECKING, Final, Self, TypeVar, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import structlog

from astraflow.core.errors import AstraflowError, Reason

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication

    from prometheus_client.core import Metric
    from prometheus_client.registry import CollectorRegistry

# From the fastest acknowledgement to the slowest one that anybody waits for.
SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)

# From a swap to a long step.
LONG_SECONDS: Final = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class MetricKind(StrEnum):
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
    kind: MetricKind
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
    return _family(MetricKind.GAUGE, name, help_text, values, labels)


def counter(
    name: str, help_text: str, values: float | Mapping[tuple[str, ...], float], *labels: str
) -> Family:
    """Return numbers that rise until the process ends; their name ends in `_total`."""
    return _family(MetricKind.COUNTER, name, help_text, values, labels)


def histogram(
    name: str, help_text: str, values: Histogram | Mapping[tuple[str, ...], Histogram], *labels: str
) -> Family:
    held = {(): values} if isinstance(values, Histogram) else values
    return _family(
        MetricKind.HISTOGRAM,
        name,
        help_text,
        {key: one.read() for key, one in held.items()},
        labels,
    )


def _family(
    kind: MetricKind,
    name: str,
    help_text: str,
    values: float | Mapping[tuple[str, ...], float] | Mapping[tuple[str, ...], Buckets],
    labels: tuple[str, ...],
) -> Family:
    held = values if isinstance(values, Mapping) else {(): values}
    return Family(name=f"astraflow_{name}", kind=kind, help=help_text, labels=labels, values=held)


log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

Seen = TypeVar("Seen")

OFF = "off"

_LOOP_S = 5.0

# How long closing may wait for the thread.
_POLL_S = 0.1


class MetricsServer:
    """Serves `/metrics` until it is closed.

    Attributes:
        address: host:port as listened on; empty: nowhere.
    """

    def __init__(self, listen: str, read: Read) -> None:
        """Begin to serve.

        Args:
            listen: host:port, port 0 takes a free one; or `off`.
            read: Called at each scrape, on a thread of the server.

        Raises:
            AstraflowError: INVALID_FIELD when the address cannot be listened on.
        """
        self.address = ""
        self._server: WSGIServer | None = None
        self._thread: Thread | None = None
        if listen == OFF:
            return
        self._server, self._thread = _serve(listen, registry_of(read))
        host, port = self._server.server_address[:2]
        self.address = f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
        log.info("metrics are served", url=f"http://{self.address}/metrics")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        server, self._server = self._server, None
        if server is not None and self._thread is not None:
            server.shutdown()
            server.server_close()
            self._thread.join()


def loop_read(look: Callable[[], Seen], tell: Callable[[Seen], Iterable[Family]]) -> Read:
    """Return a read that looks on the event loop which runs now, for state of its thread alone.

    `look` returns quickly what nobody changes any more; `tell` makes families of it on the
    scraper's thread. A scrape that comes while the loop is busy waits for it, at most 5 s.
    """
    loop = asyncio.get_running_loop()

    async def seen() -> Seen:
        return look()

    return lambda: tell(asyncio.run_coroutine_threadsafe(seen(), loop).result(_LOOP_S))


def registry_of(read: Read) -> "CollectorRegistry":
    """Return the families, and those of the process itself, as prometheus_client knows them."""
    from prometheus_client import ProcessCollector  # noqa: PLC0415 - 40 ms that few commands need
    from prometheus_client.registry import Collector, CollectorRegistry  # noqa: PLC0415

    class Families(Collector):
        def collect(self) -> "Iterator[Metric]":
            for family in read():
                yield metric_of(family)

        def describe(self) -> "list[Metric]":
            return []

    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(Families())
    return registry


def metric_of(family: Family) -> "Metric":
    """Return a family as prometheus_client knows it."""
    from prometheus_client import core  # noqa: PLC0415

    made = {
        MetricKind.HISTOGRAM: core.HistogramMetricFamily,
        MetricKind.COUNTER: core.CounterMetricFamily,
        MetricKind.GAUGE: core.GaugeMetricFamily,
    }
    held = made[family.kind](family.name, family.help, labels=family.labels)
    for labels, value in family.values.items():
        if isinstance(held, core.HistogramMetricFamily):
            if isinstance(value, Buckets):
                held.add_metric(labels, _buckets(value), value.total)
        elif not isinstance(value, Buckets):
            held.add_metric(labels, value)
    return held


def _buckets(value: Buckets) -> list[tuple[str, float]]:
    return list(zip((*map(str, value.bounds), "+Inf"), value.counts, strict=True))


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Server6(_Server):
    address_family = AF_INET6


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - named by the base
        """Say nothing: a scrape is no news."""


def _serve(listen: str, registry: "CollectorRegistry") -> tuple[WSGIServer, Thread]:
    import prometheus_client  # noqa: PLC0415

    # Its own type leaves the application's arguments open.
    app = cast("WSGIApplication", prometheus_client.make_wsgi_app(registry))  # pyright: ignore[reportUnknownMemberType]
    host, _, port = listen.rpartition(":")
    try:
        server = make_server(
            host.strip("[]"),
            int(port),
            app,
            server_class=_Server6 if ":" in host else _Server,
            handler_class=_Quiet,
        )
    except (OSError, ValueError, OverflowError) as error:
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"metrics.listen: {listen} cannot be listened on ({error}); give host:port, port 0 "
            "for a free one, or off",
        ) from error
    thread = Thread(target=server.serve_forever, args=(_POLL_S,), name="metrics", daemon=True)
    thread.start()
    return server, thread
