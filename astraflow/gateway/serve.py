"""Serving the gateway itself."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from astraflow.gateway.app import make_app
from astraflow.gateway.gateway import Gateway
from astraflow.gateway.listening import serve_app
from astraflow.gateway.settings import GatewaySettings


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
    async with (
        Gateway(settings) as gateway,
        serve_app(
            make_app(gateway),
            host=settings.host,
            rules=settings.rules,
            port=port,
            token=settings.http_token,
            tls=settings.http_tls,
        ) as address,
    ):
        yield Serving(gateway=gateway, address=address)
