"""Serving a node to a Dataflow: its endpoints, and its place in the Dataflow's pool."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, cast
from urllib.parse import urlsplit

import structlog

from astraflow.core.errors import AstraflowError
from astraflow.core.ids import PolicyId
from astraflow.gateway.listening import serve_app
from astraflow.gateway.raas.node import DataflowNode, RaasSettings
from astraflow.gateway.raas.routes import raas_app
from astraflow.gateway.serve import serve_process, until_ended
from astraflow.gateway.settings import tls_of
from astraflow.raas.main import serving_models, watching
from astraflow.raas.policies import ServedModel
from astraflow.raas.tallies import node_families
from astraflow.rpc.concurrency import beside
from astraflow.rpc.peers import Peer
from astraflow.telemetry.metrics import LoopRead, MetricsServer

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

# The answer to /shutdown is on its way.
_LAST_ANSWER_S: Final = 1.0
# A Dataflow answers once it has seen our /status, for which it waits two minutes.
_REGISTER_S: Final = 150.0
_ASK_S: Final = 10.0
_LOOK_S: Final = 15.0
# Some hundred bytes of each RaaS.
_POOL_NBYTES: Final = 8 << 20
# A Dataflow that is not told of a node's end goes on to send it prompts.
_CONNECT_RETRIES: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRaas:
    """A node that serves.

    Attributes:
        node: Its work.
        address: host:port of the HTTP endpoints.
        ended: Set once /shutdown came.
    """

    node: DataflowNode
    address: str
    ended: asyncio.Event


@asynccontextmanager
async def serve_raas(
    settings: RaasSettings,
    models: Mapping[PolicyId, ServedModel],
    *,
    port: int = 0,
    dataflow: str | None = None,
) -> AsyncGenerator[ServingRaas]:
    """Serve until the end of the block.

    Args:
        settings: What the node is.
        models: Engine and tokenizer of each policy; the engines stay the caller's.
        port: Of the HTTP endpoints; 0 takes a free one.
        dataflow: Where it is registered; None: it is called by whoever knows it.

    Raises:
        AstraflowError: INVALID_FIELD when it cannot listen there, or weights cannot be read.
    """
    ended, http = asyncio.Event(), settings.recipe.http
    tls = tls_of(http)
    async with DataflowNode(settings, models) as node, AsyncExitStack() as exits:
        app = serve_app(
            raas_app(node, ended.set),
            host=http.host,
            rules=settings.rules,
            port=port,
            token=settings.http_token,
            tls=tls,
        )
        address = await exits.enter_async_context(app)
        if dataflow is not None:
            url = f"{'http' if tls is None else 'https'}://{address}"
            await exits.enter_async_context(beside(_keep_registered(settings, dataflow, url)))
        yield ServingRaas(node=node, address=address, ended=ended)


async def _keep_registered(settings: RaasSettings, dataflow: str, url: str) -> None:
    """Register, look, register again where it was forgotten; deregister once cancelled."""
    # The operator named it: it may be dialled.
    dial = settings.dial.also(urlsplit(dataflow).hostname)
    async with Peer(dataflow, dial, retries=_CONNECT_RETRIES) as peer:
        try:
            while True:
                try:
                    if not await _is_known(peer, settings.uid):
                        fields = {"uid": settings.uid, "raas_url": url, "gpu_count": 0}
                        await peer.ask_json("POST", "/register_raas", fields, timeout_s=_REGISTER_S)
                        log.info("registered", dataflow=dataflow, uid=settings.uid)
                except AstraflowError as error:
                    log.warning("the Dataflow does not answer", url=dataflow, why=error.message)
                await asyncio.sleep(_LOOK_S)
        finally:
            uid = {"uid": settings.uid}
            try:
                await peer.ask_json("POST", "/deregister_raas", uid, timeout_s=_ASK_S)
            except AstraflowError as error:
                log.info("the Dataflow was not told", why=error.message)


async def _is_known(peer: Peer, uid: str) -> bool:
    fields = await peer.ask_json("GET", "/raas_pool", timeout_s=_ASK_S, max_nbytes=_POOL_NBYTES)
    instances = fields.get("instances")
    known = cast("list[Any]", instances) if isinstance(instances, list) else []
    return any(
        isinstance(each, dict) and cast("dict[str, Any]", each).get("uid") == uid for each in known
    )


def main_raas(settings: RaasSettings, *, dataflow: str | None, as_json: bool) -> int:
    """Serve a Dataflow until it says so, or the process is told to end; return the exit code.

    Args:
        settings: What the node is.
        dataflow: http://host:port of the Dataflow; None: it is called by whoever knows it.
        as_json: Whether the address is printed as JSON once it serves.
    """
    return serve_process(_serve(settings, dataflow=dataflow, as_json=as_json))


async def _serve(settings: RaasSettings, *, dataflow: str | None, as_json: bool) -> None:
    recipe = settings.recipe
    async with (
        serving_models(recipe, settings.models) as models,
        serve_raas(settings, models, port=recipe.http.port or 0, dataflow=dataflow) as serving,
        AsyncExitStack() as exits,
    ):
        node, ended = serving.node, serving.ended.wait()
        metrics = MetricsServer(recipe.metrics.listen, LoopRead(node.look, node_families))
        # It may wait for the loop that closes it.
        exits.push_async_callback(asyncio.to_thread, metrics.close)
        with watching(recipe, node.report, node.report):
            await until_ended(serving.address, ended, last_s=_LAST_ANSWER_S, as_json=as_json)
