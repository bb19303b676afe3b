"""HTTP: serves an ASGI app on this event loop, with patience for nobody who dawdles."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Generator
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn import Config, Server

from astraflow.core.errors import AstraflowError, Reason
from astraflow.rpc.address import join_address, split_address
from astraflow.rpc.auth import is_same_secret
from astraflow.rpc.http_protocol import BoundedProtocol, HttpLimits
from astraflow.rpc.tls import Tls, server_context

_BACKLOG = 1024
# Taken in one turn of the event loop.
_ACCEPT_COUNT = 32
_GRACE_S = 1


class HttpServer:
    """Serves one app.

    Attributes:
        address: host:port as listened on.
    """

    def __init__(self, server: "_Server", task: asyncio.Task[None], address: str) -> None:
        """Take over a server that runs; `start` is the way to get one."""
        self.address = address
        self._server = server
        self._task = task

    @classmethod
    async def start(
        cls,
        app: Any,
        *,
        listen: str,
        limits: HttpLimits | None = None,
        tls: Tls | None = None,
    ) -> "HttpServer":
        """Listen.

        Args:
            app: ASGI.
            listen: host:port; port 0 takes a free one.
            limits: Of clients.
            tls: Shown to clients, which show theirs where it has a `ca`; None: plain text.

        Raises:
            AstraflowError: INVALID_FIELD when the address cannot be listened on, or for a file
                that cannot be read.
        """
        limits = limits or HttpLimits()
        secure = None if tls is None or tls.is_plain else server_context(tls)
        bound = _bound(listen)
        server = _Server(_config(app, limits), bound, secure)
        task = asyncio.create_task(server.serve(sockets=[]))
        await server.is_ready.wait()
        bound.listen(_BACKLOG)
        host, port = bound.getsockname()[:2]
        return cls(server, task, join_address(host, port))

    async def close(self) -> None:
        """Stop; what is being answered has a second to end."""
        self._server.close()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


class _Server(Server):
    """Leaves signals to the process that it is a part of."""

    def __init__(self, config: Config, bound: socket.socket, secure: ssl.SSLContext | None) -> None:
        super().__init__(config)
        self.is_ready = asyncio.Event()
        self._is_closing = asyncio.Event()
        self._bound = bound
        self._secure = secure

    def close(self) -> None:
        self._is_closing.set()

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
        self.is_ready.set()

    async def main_loop(self) -> None:
        await self._is_closing.wait()


def _config(app: Any, limits: HttpLimits) -> Config:
    return Config(
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


class SecretGate:
    """Lets a request through to an app that shows a secret; any other learns nothing from it."""

    def __init__(
        self, app: ASGIApp, *, secret: str, shown: Callable[[Headers], str], refused: ASGIApp
    ) -> None:
        """Guard an app.

        Args:
            app: What is behind it.
            secret: That requests show.
            shown: Returns what a request shows, of its headers; empty: nothing.
            refused: Answers the others.
        """
        self._app = app
        self._secret = secret
        self._shown = shown
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have one of the two answer."""
        is_known = is_same_secret(self._shown(Headers(scope=scope)), self._secret)
        await (self._app if is_known else self._refused)(scope, receive, send)


def bearer_of(headers: Headers) -> str:
    """Return the token of `Authorization: Bearer`; empty: there is none."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""
