"""Serving a pool to an existing Dataflow, in a process of its own or in a test."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import structlog

from astraflow.client.duplex import beside
from astraflow.core.errors import AstraflowError
from astraflow.gateway.listening import serve_app
from astraflow.gateway.pool.announcing import Announcer
from astraflow.gateway.pool.pool import DataflowPool
from astraflow.gateway.pool.routes import pool_app
from astraflow.gateway.pool.settings import PoolSettings
from astraflow.gateway.process import stop_event, tls_of
from astraflow.telemetry.logging import configure_logging

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

# The answer to /shutdown is on its way.
_LAST_ANSWER_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPool:
    """A pool that serves.

    Attributes:
        pool: Its nodes and their work.
        address: host:port of the HTTP endpoints.
        ended: Set once /shutdown came.
    """

    pool: DataflowPool
    address: str
    ended: asyncio.Event


@asynccontextmanager
async def serve_pool(
    settings: PoolSettings, *, port: int = 0, dataflow: str | None = None
) -> AsyncGenerator[ServingPool]:
    """Serve until the end of the block.

    Args:
        settings: What the pool is.
        port: Of the HTTP endpoints; 0 takes a free one.
        dataflow: Where it is registered; None: it is called by whoever knows it.

    Raises:
        AstraflowError: INVALID_FIELD when it cannot listen there, or weights cannot be read.
    """
    ended, host, tls = asyncio.Event(), settings.recipe.http.host, tls_of(settings.recipe.http)
    async with DataflowPool(settings) as pool, AsyncExitStack() as exits:
        app = serve_app(
            pool_app(pool, ended.set),
            host=host,
            rules=settings.rules,
            port=port,
            token=settings.http_token,
            tls=tls,
        )
        address = await exits.enter_async_context(app)
        scheme = "http" if tls is None else "https"
        if dataflow is not None:
            announcer = Announcer(pool, dataflow=dataflow, url=f"{scheme}://{address}")
            await exits.enter_async_context(beside(announcer.run()))
        yield ServingPool(pool=pool, address=address, ended=ended)


def main_pool(settings: PoolSettings, *, dataflow: str | None, as_json: bool) -> int:
    """Serve until the process is told to end; return the exit code.

    Args:
        settings: What the pool is.
        dataflow: http://host:port of the existing Dataflow.
        as_json: Whether both addresses are printed as JSON once it serves.
    """
    configure_logging("gateway")
    try:
        asyncio.run(_serve(settings, dataflow=dataflow, as_json=as_json))
    except AstraflowError as error:
        log.error("the gateway failed", reason=error.reason, why=error.message)  # noqa: TRY400
        return 1
    return 0


async def _serve(settings: PoolSettings, *, dataflow: str | None, as_json: bool) -> None:
    stopped, port = stop_event(), settings.recipe.http.port or 0
    async with serve_pool(settings, port=port, dataflow=dataflow) as serving:
        told = {"address": serving.address, "nodes": serving.pool.address}
        if as_json:
            print(json.dumps(told), flush=True)  # noqa: T201 - asked for
        log.info("gateway serves a Dataflow", **told, docs=f"http://{serving.address}/docs")
        waits = [asyncio.ensure_future(each.wait()) for each in (stopped, serving.ended)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if not stopped.is_set():
            await asyncio.sleep(_LAST_ANSWER_S)
