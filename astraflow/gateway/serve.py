"""Serving: the socket, the server, and its end."""

import asyncio
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import cast

import structlog
import uvicorn

from astraflow.client.duplex import beside
from astraflow.core.errors import AstraflowError, Reason
from astraflow.gateway.app import make_app
from astraflow.gateway.edge.protocol import PatientProtocol
from astraflow.gateway.gateway import Gateway
from astraflow.gateway.settings import GatewaySettings

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_CONNECTIONS = 1024
_IDLE_S = 75
_GOOD_BYE_S = 2


class _Server(uvicorn.Server):
    """uvicorn's, which leaves signals to whoever runs it."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Capture none."""
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A gateway that serves.

    Attributes:
        gateway: What it serves.
        address: host:port.
    """

    gateway: Gateway
    address: str


@asynccontextmanager
async def serve_gateway(settings: GatewaySettings, *, port: int = 0) -> AsyncGenerator[Serving]:
    """Serve until the end of the block.

    Args:
        settings: What the gateway is.
        port: 0 takes a free one.

    Raises:
        AstraflowError: INVALID_FIELD when it cannot listen there.
    """
    with _listening(settings.host, port) as listener:
        async with Gateway(settings) as gateway:
            config = uvicorn.Config(
                make_app(gateway),
                http=_protocol(settings),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                limit_concurrency=_CONNECTIONS,
                timeout_keep_alive=_IDLE_S,
                timeout_graceful_shutdown=_GOOD_BYE_S,
            )
            server = _Server(config)
            host, bound = listener.getsockname()[:2]
            async with beside() as group:
                serving = group.create_task(server.serve(sockets=[listener]))
                try:
                    yield Serving(gateway=gateway, address=f"{host}:{bound}")
                finally:
                    server.should_exit = True
                    await serving


def _protocol(settings: GatewaySettings) -> type[asyncio.Protocol]:
    """Return what makes a connection; uvicorn takes anything that does."""
    made = partial(PatientProtocol, head_timeout_s=settings.rules.head_timeout_s)
    return cast("type[asyncio.Protocol]", made)


@contextmanager
def _listening(host: str, port: int) -> Generator[socket.socket]:
    try:
        listener = socket.create_server((host, port), backlog=256)
    except OSError as error:
        raise AstraflowError(
            Reason.INVALID_FIELD, f"cannot listen on {host}:{port}: {error}; give another --port"
        ) from error
    with listener:
        yield listener
