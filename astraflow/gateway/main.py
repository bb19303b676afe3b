"""The process of a gateway: it serves until it is told to end, or the run is over."""

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog

from astraflow.client.control import ControlClient
from astraflow.config.recipe import Recipe
from astraflow.core.errors import AstraflowError
from astraflow.gateway.process import dial_of, rules_of, stop_event, tls_of
from astraflow.gateway.serve import serve_gateway
from astraflow.gateway.settings import GatewaySettings, codes_of, policies_of
from astraflow.rpc.tls import Tls
from astraflow.telemetry.logging import configure_logging

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

# Peers get to know that the run is over.
_LAST_ANSWERS_S = 5.0


def main_gateway(
    recipe: Recipe,
    *,
    hub: str,
    token: str,
    operator_token: str | None,
    models: Mapping[str, Path] | None = None,
    http_token: str,
    tls: Tls | None,
    as_json: bool,
) -> int:
    """Serve the gateway of a run; return the exit code.

    Args:
        recipe: Of the run.
        hub: host:port.
        token: The run's join token.
        models: First weights by policy; a policy left out: the recipe's.
        operator_token: None: /status, /raas_pool and /shutdown are not served.
        http_token: That callers show; empty: they show none.
        tls: Of the hub; None: plain text.
        as_json: Whether the address is printed as JSON once it serves.
    """
    configure_logging("gateway")
    http = recipe.http
    settings = GatewaySettings(
        hub=hub,
        token=token,
        operator_token=operator_token,
        policies=policies_of(recipe, models or {}),
        group_size=recipe.rollouts.group_size,
        codes=codes_of(recipe),
        host=http.host,
        rules=rules_of(http),
        dial=dial_of(http),
        http_token=http_token,
        http_tls=tls_of(http),
        batch_timeout_s=http.batch_timeout_s,
        transfer_timeout_s=http.transfer_timeout_s,
        silence_s=http.silence_s,
        patience_s=recipe.hub.patience_s,
        tls=tls,
    )
    try:
        asyncio.run(_serve(settings, port=http.port or 0, as_json=as_json))
    except AstraflowError as error:
        log.error("the gateway failed", reason=error.reason, why=error.message)  # noqa: TRY400
        return 1
    return 0


async def _serve(settings: GatewaySettings, *, port: int, as_json: bool) -> None:
    stopped = stop_event()
    async with serve_gateway(settings, port=port) as serving:
        if as_json:
            print(json.dumps({"address": serving.address}), flush=True)  # noqa: T201 - asked for
        log.info("gateway serves", address=serving.address, docs=f"http://{serving.address}/docs")
        waits: set[asyncio.Future[Any]] = {asyncio.ensure_future(stopped.wait())}
        if settings.operator_token is not None:
            waits.add(asyncio.ensure_future(_run_over(serving.gateway.control)))
        done, left = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in left:
            wait.cancel()
        for wait in done:
            wait.result()
        if not stopped.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), _LAST_ANSWERS_S)


async def _run_over(control: ControlClient) -> None:
    """Wait until the state of the run is final."""
    async for status in control.watch_run():
        if status.state.is_final:
            return
