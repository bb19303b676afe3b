"""HTTP: serves an ASGI app on this event loop, with bounds on what each connection may send."""

import asyncio
import contextlib
import json
import socket
import ssl
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn import Config, Server
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from astraflow.core.errors import AstraflowError, Reason
from astraflow.rpc.address import join_address, split_address
from astraflow.rpc.auth import is_same_secret
from astraflow.rpc.tls import Tls, server_context

# Of all that is no body: request line, headers, trailers.
MAX_HEAD_NBYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """What a client may take.

    Attributes:
        head_s: Seconds for the head of a request.
        idle_s: Seconds between two requests of a connection.
        connection_count: Connections at once; None: no limit. One more takes the place of the one
            that its client keeps waiting longest, and is closed where every one is being answered.
        host_connection_count: The same, of one host.
        late_answer: Sent, whole, to who took too long for a head; empty: nothing is.
        wrong_answer: Makes what is sent, whole, to who sent no request, of why; None: plain text.
    """

    head_s: float = 10.0
    idle_s: float = 120.0
    connection_count: int | None = None
    host_connection_count: int | None = None
    late_answer: bytes = b""
    wrong_answer: Callable[[str], bytes] | None = None


class HeadTooLarge(ValueError):  # noqa: N818 - the parser answers it with a 400
    """More than MAX_HEAD_NBYTES came that is no body."""


class BoundedProtocol(HttpToolsProtocol):
    """A connection within limits; a subclass has them."""

    limits: ClassVar[HttpLimits] = HttpLimits()
    # By host: connections with what they sent first.
    arrived: ClassVar[dict[str, deque[tuple["BoundedProtocol", bytes]]]] = {}
    since_s = 0.0
    _is_new = True
    _timer: asyncio.TimerHandle | None = None
    _head_nbytes = 0
    # Since the parser last told of anything: a line that does not end.
    _untold_nbytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - as the base has it
        super().connection_made(transport)
        self.since_s = self.loop.time()
        self._evict()
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Take bytes; the first ones of a connection in turn with those of other hosts."""
        if self._is_new:
            self._is_new = False
            self.transport.pause_reading()
            if not self.arrived:
                self.loop.call_soon(self._admit)
            self.arrived.setdefault(_host(self), deque()).append((self, data))
            return
        self._untold_nbytes += len(data)
        super().data_received(data)
        if self._untold_nbytes > MAX_HEAD_NBYTES and not self.transport.is_closing():
            self.send_400_response(f"A head has at most {MAX_HEAD_NBYTES} bytes here.")
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no request, and end."""
        if self.limits.wrong_answer is None:
            super().send_400_response(msg)
        else:
            self.transport.write(self.limits.wrong_answer(msg))
            self.transport.close()

    def on_response_complete(self) -> None:
        """End an answer; the next request is due."""
        self.since_s = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop()

    def on_message_begin(self) -> None:
        self._head_nbytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Take a part of the request line."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, or a trailer."""
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._untold_nbytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body, which the app bounds."""
        self._untold_nbytes = 0
        super().on_body(body)

    def _evict(self) -> None:
        """Close a connection where there are too many, of the same host first."""
        connections = [
            each
            for each in self.connections
            if isinstance(each, BoundedProtocol) and not each.transport.is_closing()
        ]
        own = [each for each in connections if _host(each) == _host(self)]
        for known, count in (
            (own, self.limits.host_connection_count),
            (connections, self.limits.connection_count),
        ):
            if count is not None and len(known) > count:
                min(known, key=self._dispensable).transport.abort()
                return

    def _dispensable(self, other: "BoundedProtocol") -> tuple[int, float]:
        """Order connections: those that owe a request, idle ones, this one, those that work."""
        cycle: Any = other.cycle  # None before the first request
        if other is self:
            rank = 2
        elif cycle is not None and cycle.response_complete:
            rank = 1
        else:
            rank = 0 if cycle is None or cycle.more_body else 3
        return rank, other.since_s

    def _admit(self) -> None:
        """Let one new connection of each host begin, and the others in the next turns."""
        due = [arrived.popleft() for arrived in self.arrived.values()]
        for host in [host for host, arrived in self.arrived.items() if not arrived]:
            del self.arrived[host]
        if self.arrived:
            self.loop.call_soon(self._admit)
        for connection, data in due:
            if not connection.transport.is_closing():
                connection.transport.resume_reading()
                connection.data_received(data)

    def _count(self, nbytes: int) -> None:
        self._untold_nbytes = 0
        self._head_nbytes += nbytes
        if self._head_nbytes > MAX_HEAD_NBYTES:
            raise HeadTooLarge

    def _watch(self) -> None:
        cycle: Any = self.cycle  # None before the first request
        is_answering = cycle is not None and not cycle.response_complete
        if is_answering:
            self._stop()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.limits.head_s, self._give_up)

    def _give_up(self) -> None:
        if self.limits.late_answer and not self.transport.is_closing():
            self.transport.write(self.limits.late_answer)
        self.transport.close()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _host(connection: BoundedProtocol) -> str:
    return connection.client[0] if connection.client else ""


_BACKLOG = 1024

# Taken in one turn of the event loop.
_ACCEPT_COUNT = 32
_GRACE_S = 1


class HttpServer(Server):
    """Serves one app, and leaves signals to the process that it is a part of; `start` makes one.

    Attributes:
        address: host:port as listened on.
    """

    address = ""

    def __init__(self, config: Config, bound: socket.socket, secure: ssl.SSLContext | None) -> None:
        super().__init__(config)
        self._bound = bound
        self._secure = secure
        self._is_ready = asyncio.Event()
        self._is_closing = asyncio.Event()
        self._task = asyncio.create_task(self.serve(sockets=[]))

    @classmethod
    async def start(
        cls,
        app: Any,
        *,
        listen: str,
        limits: HttpLimits | None = None,
        tls: Tls | None = None,
    ) -> Self:
        """Serve an ASGI app on host:port; clients show a certificate where `tls` has a `ca`.

        Raises:
            AstraflowError: INVALID_FIELD when the address cannot be listened on, or for a file
                that cannot be read.
        """
        limits = limits or HttpLimits()
        secure = None if tls is None or tls.is_plain else server_context(tls)
        bound = _bound(listen)
        config = Config(
            app,
            http=type("Bounded", (BoundedProtocol,), {"limits": limits, "arrived": {}}),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=int(limits.idle_s),
            timeout_graceful_shutdown=_GRACE_S,
        )
        server = cls(config, bound, secure)
        ready = asyncio.ensure_future(server._is_ready.wait())
        await asyncio.wait({ready, server._task}, return_when=asyncio.FIRST_COMPLETED)
        if not server._is_ready.is_set():
            ready.cancel()
            bound.close()
            # What ended it; if it ended without, nobody would be served either.
            server._task.result()
            raise AstraflowError(Reason.INTERNAL, f"the server on {listen} ended as it started")
        bound.listen(_BACKLOG)
        host, port = bound.getsockname()[:2]
        server.address = join_address(host, port)
        return server

    async def close(self) -> None:
        """Stop; what is being answered has a second to end."""
        self._is_closing.set()
        # Who is cancelled meanwhile gets to know; that it was is no error.
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.result()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        protocol: Any = self.config.http_protocol_class
        handshake_s = None if self._secure is None else protocol.limits.head_s
        server = await asyncio.get_running_loop().create_server(
            lambda: protocol(self.config, self.server_state, self.lifespan.state),
            sock=self._bound,
            ssl=self._secure,
            ssl_handshake_timeout=handshake_s,
            backlog=_ACCEPT_COUNT,
        )
        self.servers.append(server)
        self._is_ready.set()

    async def main_loop(self) -> None:
        await self._is_closing.wait()


def _bound(listen: str) -> socket.socket:
    host, port = split_address(listen, "listen")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit it; asyncio sets it for sockets of its own making only.
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise AstraflowError(
            Reason.INVALID_FIELD, f"nothing can listen on {listen}: {error}; choose another port"
        ) from error
    return made


def behind_secret(
    app: ASGIApp, *, secret: str, shown: Callable[[Headers], str], refused: ASGIApp
) -> ASGIApp:
    """Return an app behind a secret that headers show; who shows another learns nothing of it."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        is_known = is_same_secret(shown(Headers(scope=scope)), secret)
        await (app if is_known else refused)(scope, receive, send)

    return answer


T = TypeVar("T")


async def disconnected(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnect(
    receive: Receive, work: Coroutine[Any, Any, T], *, timeout_s: float | None = None
) -> T:
    """Await work; stop it when the client leaves.

    Raises:
        ClientDisconnect: When it did.
        TimeoutError: It took longer than that.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait(
            {working, leaving}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if working.done():
            return working.result()
        raise ClientDisconnect if leaving.done() else TimeoutError
    finally:
        working.cancel()
        leaving.cancel()
        # So that what work cleans up is done before the answer.
        await asyncio.wait({working, leaving})


def json_answer(fields: Any, status: int = 200) -> Response:
    """Return an answer that is JSON whatever the caller accepts."""
    # Escaped: a text of a request may be none of Unicode.
    return Response(json.dumps(fields), status, media_type="application/json")


def bearer_of(headers: Headers) -> str:
    """Return the token of `Authorization: Bearer`; empty: there is none."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""
