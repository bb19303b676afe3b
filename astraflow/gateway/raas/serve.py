"""Dataflow -> RaaS: the endpoints of a published RaaS, on a node of ours.

Answers of POST are {"ok": true, "result": ...}, those of faults {"ok": false, "error": ...}.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final, cast
from urllib.parse import urlsplit

import structlog
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from astraflow import __version__
from astraflow.core.errors import AstraflowError
from astraflow.core.ids import PolicyId
from astraflow.core.tasks import TaskPurpose
from astraflow.gateway.http import (
    ANSWERS,
    Fields,
    LoadVersion,
    add_errors,
    answer,
    body_of,
    read_body,
    serve_app,
    stream_answer,
)
from astraflow.gateway.raas.node import DataflowNode, RaasSettings
from astraflow.gateway.raas.workflows import RegisterWorkflow, SubmitPrompt
from astraflow.gateway.serve import serve_process, until_ended
from astraflow.gateway.settings import tls_of, url_of
from astraflow.raas.main import serving_models, watching
from astraflow.raas.policies import ServedModel
from astraflow.rpc.concurrency import beside, reserve_threads
from astraflow.rpc.http import json_answer
from astraflow.rpc.peers import Peer, caller_of
from astraflow.telemetry.metrics import MetricsServer, loop_read

# Whoever wants to wait longer asks again.
_MAX_WAIT_S = 60.0


class Pull(Fields):
    """What has finished is wanted."""

    max_items: int = Field(default=256, ge=1, le=4096, description="Results at most.")
    timeout: float = Field(default=0.0, ge=0, strict=False, description="Seconds to wait for one.")


class Reset(Fields):
    """Training rollouts are not wanted any more."""

    timeout: float = Field(default=5.0, ge=0, le=600, strict=False, description="Seconds to wait.")


class Anything(BaseModel):
    """A body of which nothing is used."""


def raas_app(node: DataflowNode) -> FastAPI:
    """Return the app of a node that was entered."""
    app = FastAPI(title="astraflow gateway: RaaS", version=__version__, description=__doc__ or "")
    add_errors(app, write=_refused)
    app.include_router(_training(node))
    app.include_router(_evaluations(node))
    app.include_router(_steering(node))
    return app


def _training(node: DataflowNode) -> APIRouter:
    router = APIRouter(tags=["Dataflow to RaaS"], responses=ANSWERS)

    @router.post("/register_workflow", openapi_extra=body_of(RegisterWorkflow))
    async def register_workflow(request: Request) -> Response:
        """Name a workflow of the recipe, with its sampling; the node has its code."""
        asked = await read_body(request, node.settings.rules, RegisterWorkflow)
        return await _result(request, node.book.register(asked))

    @router.post("/submit", openapi_extra=body_of(SubmitPrompt))
    async def submit(request: Request) -> Response:
        """Take a prompt; every one of its samples comes to an end, and is pulled as one result."""
        return await _submitted(node, request, TaskPurpose.TRAIN)

    @router.post("/pull", openapi_extra=body_of(Pull))
    async def pull(request: Request) -> Response:
        """Return what has finished, and waits for up to `timeout` where nothing has.

        What its reader has not read to the end is returned again.
        """
        return await _pulled(node, request, TaskPurpose.TRAIN)

    return router


def _evaluations(node: DataflowNode) -> APIRouter:
    router = APIRouter(tags=["Evaluations"], responses=ANSWERS)

    @router.post("/reset_training_engine", openapi_extra=body_of(Reset))
    async def reset_training_engine(request: Request) -> Response:
        """Cancel training rollouts and drop what of them was not pulled."""
        asked = await read_body(request, node.settings.rules, Reset)
        return await _result(request, await node.reset(asked.timeout))

    @router.post("/eval_start")
    async def eval_start(request: Request) -> Response:
        """Answer: evaluations need no preparation, and training goes on beside them."""
        return await _marked(node, request, "eval_started")

    @router.post("/eval_submit", openapi_extra=body_of(SubmitPrompt))
    async def eval_submit(request: Request) -> Response:
        """Take a prompt to be measured with the newest version, and with no other."""
        return await _submitted(node, request, TaskPurpose.EVAL)

    @router.post("/eval_pull", openapi_extra=body_of(Pull))
    async def eval_pull(request: Request) -> Response:
        """Return what of evaluations has finished, and how much is open."""
        return await _pulled(node, request, TaskPurpose.EVAL)

    @router.post("/eval_end")
    async def eval_end(request: Request) -> Response:
        """Answer: there is nothing to undo."""
        return await _marked(node, request, "eval_ended")

    return router


def _steering(node: DataflowNode) -> APIRouter:
    router = APIRouter(tags=["Dataflow to RaaS"])

    @router.get("/status")
    async def status() -> Response:
        """Say how the node stands, and what is open."""
        return json_answer(node.status())

    @router.get("/availability")
    async def availability() -> Response:
        """Say how many more prompts there is room for."""
        return json_answer(node.availability())

    @router.post("/notify_version", openapi_extra=body_of(LoadVersion), responses=ANSWERS)
    async def notify_version(request: Request) -> Response:
        """Fetch a version from the trainer's sender; answers once it is what is sampled with."""
        asked = await read_body(request, node.settings.rules, LoadVersion)
        return await _result(request, await node.load(asked, caller=caller_of(request)))

    @router.post("/shutdown", responses=ANSWERS)
    async def end(request: Request) -> Response:
        """End the node; what it runs is lost."""
        await read_body(request, node.settings.rules, Fields)
        node.ended.set()
        return await _result(request, "shutting down")

    return router


async def _submitted(node: DataflowNode, request: Request, purpose: TaskPurpose) -> Response:
    asked = await read_body(request, node.settings.rules, SubmitPrompt)
    return await _result(request, {"task_id": node.submit(asked, purpose)})


async def _pulled(node: DataflowNode, request: Request, purpose: TaskPurpose) -> Response:
    """Answer with what has finished; it is forgotten once all of the answer was written."""
    asked = await read_body(request, node.settings.rules, Pull)
    queue = node.orders
    if asked.timeout:
        await queue.until(lambda: queue.has_finished(purpose), min(asked.timeout, _MAX_WAIT_S))
    finished = queue.begin_delivery(purpose, asked.max_items)
    result: Any = node.items(finished)
    if purpose is TaskPurpose.EVAL:
        pending = queue.waiting_count(purpose)
        result = {
            "items": result,
            "inflight": queue.open_count(purpose) - pending,
            "pending": pending,
            "total_submitted": queue.submitted_count[purpose],
        }

    def ended(is_delivered: bool) -> None:
        queue.end_delivery(finished, is_delivered=is_delivered)

    return await stream_answer(request, {"ok": True, "result": result}, ended=ended)


async def _marked(node: DataflowNode, request: Request, status: str) -> Response:
    await read_body(request, node.settings.rules, Anything)
    return await _result(request, {"status": status})


async def _result(request: Request, result: Any) -> Response:
    return await answer(request, {"ok": True, "result": result})


async def _refused(request: Request, status: int, fields: dict[str, Any]) -> Response:
    """Answer a fault as published, in the envelope of all answers."""
    if request.method == "GET":
        return json_answer(fields, status)
    try:
        return await answer(request, {"ok": False, **fields}, status=status)
    except HTTPException:
        return json_answer({"ok": False, **fields}, status)


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


@asynccontextmanager
async def serve_raas(
    settings: RaasSettings,
    models: Mapping[PolicyId, ServedModel],
    *,
    port: int = 0,
    dataflow: str | None = None,
) -> AsyncGenerator[DataflowNode]:
    """Serve until the end of the block; yield what is served. Engines stay the caller's.

    Raises:
        AstraflowError: INVALID_FIELD when it cannot listen there, or weights cannot be read.
    """
    http = settings.recipe.http
    tls = tls_of(http)
    async with DataflowNode(settings, models) as node, AsyncExitStack() as exits:
        app = serve_app(
            raas_app(node),
            host=http.host,
            rules=settings.rules,
            port=port,
            token=settings.http_token,
            tls=tls,
        )
        node.address = await exits.enter_async_context(app)
        if dataflow is not None:
            url = url_of(http, node.address)
            await exits.enter_async_context(beside(_keep_registered(settings, dataflow, url)))
        yield node


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
    """Serve a Dataflow until it says so, or the process is told to end; return the exit code."""
    return serve_process(_serve(settings, dataflow=dataflow, as_json=as_json))


async def _serve(settings: RaasSettings, *, dataflow: str | None, as_json: bool) -> None:
    recipe = settings.recipe
    reserve_threads(recipe.raas.capacity + recipe.raas.eval_place_count)
    async with (
        serving_models(recipe, settings.models) as models,
        serve_raas(settings, models, port=recipe.http.port or 0, dataflow=dataflow) as node,
        MetricsServer(recipe.metrics.listen, loop_read(node.runner.families, iter)),
    ):
        with watching(recipe, node.report, node.report):
            url = url_of(recipe.http, node.address)
            await until_ended(url, node.ended.wait(), last_s=_LAST_ANSWER_S, as_json=as_json)
