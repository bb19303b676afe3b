"""Serving the gateway, until its process is told to end or the run is over."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncGenerator, Awaitable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import structlog
from fastapi import FastAPI

from astraflow import __version__
from astraflow.client.control import ControlClient
from astraflow.core.errors import AstraflowError
from astraflow.gateway.edge.errors import add_errors
from astraflow.gateway.gateway import Gateway
from astraflow.gateway.listening import serve_app
from astraflow.gateway.routes import run_routes, trainer_routes
from astraflow.gateway.settings import GatewaySettings, tls_of
from astraflow.telemetry.garbage import collect_rarely, keep_for_good
from astraflow.telemetry.logging import configure_logging

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

# Peers get to know that the run is over.
_LAST_ANSWERS_S: Final = 5.0
# A thread that reads a large body gives the interpreter back so often: 5 ms, and a small request
# that needs it ten times waits for 50.
_SWITCH_S: Final = 0.0005
_ABOUT: Final = """
The endpoints of AstraFlow's published services, on a run of astraflow: an existing trainer or
RaaS joins it unmodified. The gateway keeps no truth of its own: it is a client of the hub's gRPC
contract.

**Bodies.** Answers are pickled dicts unless `Accept` names `application/json` (tensors as
`{dtype, shape, data}`, base64) or `application/vnd.safetensors`. Requests are JSON; pickled
ones are read with `--legacy-pickle` only, and by a reader that runs nothing.

**Errors** are `{"error": "a sentence that names what to do"}`.
"""


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
    http = settings.recipe.http
    async with Gateway(settings) as gateway:
        app = FastAPI(title="astraflow gateway", version=__version__, description=_ABOUT)
        add_errors(app)
        app.include_router(trainer_routes(gateway))
        app.include_router(run_routes(gateway))
        async with serve_app(
            app,
            host=http.host,
            rules=settings.rules,
            port=port,
            token=settings.http_token,
            tls=tls_of(http),
        ) as address:
            yield Serving(gateway=gateway, address=address)


def main_gateway(settings: GatewaySettings, *, as_json: bool) -> int:
    """Serve the gateway of a run until it is over, or the process is told to end.

    Args:
        settings: What the gateway is.
        as_json: Whether the address is printed as JSON once it serves.

    Returns:
        The exit code; the log says why it is not 0.
    """
    return serve_process(_serve(settings, as_json=as_json))


def serve_process(serving: Coroutine[Any, Any, None]) -> int:
    """Run what serves in this process; return the exit code."""
    configure_logging("gateway")
    try:
        asyncio.run(serving)
    except AstraflowError as error:
        log.error("the gateway failed", reason=error.reason, why=error.message)  # noqa: TRY400
        return error.exit_code
    return 0


async def _serve(settings: GatewaySettings, *, as_json: bool) -> None:
    async with serve_gateway(settings, port=settings.recipe.http.port or 0) as serving:
        control = None if settings.operator_token is None else serving.gateway.control
        ended = None if control is None else _run_over(control)
        await until_ended(serving.address, ended, last_s=_LAST_ANSWERS_S, as_json=as_json)


async def until_ended(
    address: str, ended: Awaitable[object] | None, *, last_s: float, as_json: bool
) -> None:
    """Tell where is served, and wait until the process is told to end; keep its pauses short.

    Args:
        address: host:port.
        ended: Over when serving is; None: the process is told.
        last_s: Seconds for which it is served on then: somebody waits for an answer.
        as_json: Whether the address is printed as JSON.
    """
    stopped = stop_event()
    if as_json:
        print(json.dumps({"address": address}), flush=True)  # noqa: T201 - asked for
    log.info("gateway serves", address=address, docs=f"http://{address}/docs")
    waits = [asyncio.ensure_future(each) for each in (stopped.wait(), ended) if each is not None]
    done, left = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in left:
        wait.cancel()
    for wait in done:
        wait.result()
    with suppress(TimeoutError):
        await asyncio.wait_for(stopped.wait(), last_s)


async def _run_over(control: ControlClient) -> None:
    """Wait until the state of the run is final."""
    async for status in control.watch_run():
        if status.state.is_final:
            return


def stop_event() -> asyncio.Event:
    """Return what is set once the process is told to end; keep its pauses short until then."""
    sys.setswitchinterval(_SWITCH_S)
    keep_for_good()
    collect_rarely()
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    return stopped
