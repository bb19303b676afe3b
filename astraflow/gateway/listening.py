"""Listening: an app on a socket of its own, on the running event loop."""

import asyncio
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import cast

import uvicorn
from fastapi import FastAPI

from astraflow.client.duplex import beside
from astraflow.core.errors import AstraflowError, Reason
from astraflow.gateway.edge.protocol import PatientProtocol
from astraflow.gateway.settings import GatewaySettings

_CONNECTIONS = 1024
_IDLE_S = 75
_GOOD_BYE_S = 2


class _Server(uvicorn.Server):
    """uvicorn's, which leaves signals to whoever runs it."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Capture none."""
        yield


@asynccontextmanager
async def serve_app(
    app: FastAPI, settings: GatewaySettings, *, port: int = 0
) -> AsyncGenerator[str]:
    """Serve an app until the end of the block; yield its host:port.

    Args:
        app: What is served.
        settings: Of the gateway.
        port: 0 takes a free one.

    Raises:
        AstraflowError: INVALID_FIELD when it cannot listen there.
    """
    with _listening(settings.host, port) as listener:
        config = uvicorn.Config(
            app,
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
        async with beside() as group:
            serving = group.create_task(server.serve(sockets=[listener]))
            try:
                yield f"{settings.host}:{listener.getsockname()[1]}"
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
        # Connections inherit it; asyncio sets it for sockets of its own making only.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield listener
