"""The metrics of a process: families, and how Prometheus reads them over HTTP.

Formatting and HTTP run on threads of their own; nothing is counted until a scraper asks.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from socket import AF_INET, AF_INET6
from threading import Thread
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Self, TypeAlias, TypeVar, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import structlog

from astraflow.core.errors import AstraflowError, Reason

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication

    from prometheus_client.core import Metric

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

# From the fastest acknowledgement to the slowest one that anybody waits for.
SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)

# From a swap to a long step.
LONG_SECONDS: Final = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Family(NamedTuple):
    """Numbers under one name, as they are when it is made; cheap, for it is made on event loops.

    Attributes:
        name: As scraped.
        help: One sentence.
        kind: What they are.
        labels: Names of the labels.
        samples: By the values of the labels, a number or what a histogram reads.
    """

    name: str
    help: str
    kind: Literal["gauge", "counter", "histogram"]
    labels: tuple[str, ...]
    samples: tuple[tuple[tuple[str, ...], Any], ...]


Read: TypeAlias = Callable[[], Iterable[Family]]


class Histogram:
    """Counts values by size; for one writer, and readers on any thread.

    Example:
        >>> waits = Histogram((1.0, 2.0))
        >>> for seconds in (0.5, 2.0, 9.0):
        ...     waits.observe(seconds)
        >>> waits.read()
        ((('1.0', 1), ('2.0', 2), ('+Inf', 3)), 11.5)
    """

    __slots__ = ("_bounds", "_counts", "_names", "_total")

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self._bounds = bounds
        self._names = (*map(str, bounds), "+Inf")
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value, so many times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._total += value * count

    def read(self) -> tuple[tuple[tuple[str, int], ...], float]:
        """Return each bound with how many values are at most that, and the sum of all values."""
        counts = accumulate(tuple(self._counts))
        return tuple(zip(self._names, counts, strict=True)), self._total


def gauge(
    name: str, help_text: str, values: float | Mapping[tuple[str, ...], float], *labels: str
) -> Family:
    """Return numbers that rise and fall; one number alone has no labels."""
    return Family(f"astraflow_{name}", help_text, "gauge", labels, _by_labels(values))


def counter(
    name: str, help_text: str, values: float | Mapping[tuple[str, ...], float], *labels: str
) -> Family:
    """Return numbers that rise until the process ends; their name ends in `_total`."""
    return Family(f"astraflow_{name}", help_text, "counter", labels, _by_labels(values))


def histogram(
    name: str, help_text: str, values: Histogram | Mapping[tuple[str, ...], Histogram], *labels: str
) -> Family:
    samples = tuple((key, each.read()) for key, each in _by_labels(values))
    return Family(f"astraflow_{name}", help_text, "histogram", labels, samples)


Value = TypeVar("Value", float, Histogram)


def _by_labels(
    values: Value | Mapping[tuple[str, ...], Value],
) -> tuple[tuple[tuple[str, ...], Value], ...]:
    if isinstance(values, Mapping):
        return tuple(values.items())
    return (((), values),)


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
        self._server, self._thread = _serve(listen, read)
        host, port = self._server.server_address[:2]
        self.address = f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
        log.info("metrics are served", url=f"http://{self.address}/metrics")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        # A scrape may wait for the loop that closes it.
        await asyncio.to_thread(self.close)

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


def _metric(family: Family) -> "Metric":
    """Return a family as prometheus_client knows it."""
    from prometheus_client import core  # noqa: PLC0415

    if family.kind == "histogram":
        made = core.HistogramMetricFamily(family.name, family.help, labels=family.labels)
        for labels, (buckets, total) in family.samples:
            made.add_metric(labels, buckets, total)
        return made
    make = core.GaugeMetricFamily if family.kind == "gauge" else core.CounterMetricFamily
    made = make(family.name, family.help, labels=family.labels)
    for labels, value in family.samples:
        made.add_metric(labels, value)
    return made


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - named by the base
        """Say nothing: a scrape is no news."""


def _serve(listen: str, read: Read) -> tuple[WSGIServer, Thread]:
    """Serve the families, and those of the process itself."""
    import prometheus_client  # noqa: PLC0415 - 40 ms that few commands need
    from prometheus_client.exposition import ThreadingWSGIServer  # noqa: PLC0415
    from prometheus_client.registry import Collector, CollectorRegistry  # noqa: PLC0415

    class Families(Collector):
        def collect(self) -> "Iterator[Metric]":
            return map(_metric, read())

    registry = CollectorRegistry()
    prometheus_client.ProcessCollector(registry=registry)
    registry.register(Families())
    # Its own type leaves the application's arguments open.
    app = cast("WSGIApplication", prometheus_client.make_wsgi_app(registry))  # pyright: ignore[reportUnknownMemberType]
    host, _, port = listen.rpartition(":")

    class Server(ThreadingWSGIServer):
        address_family = AF_INET6 if ":" in host else AF_INET

    try:
        server = make_server(host.strip("[]"), int(port), app, Server, handler_class=_Quiet)
    except (OSError, ValueError, OverflowError) as error:
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"metrics.listen: {listen} cannot be listened on ({error}); give host:port, port 0 "
            "for a free one, or off",
        ) from error
    thread = Thread(target=server.serve_forever, args=(_POLL_S,), name="metrics", daemon=True)
    thread.start()
    return server, thread
