"""Dataflow -> RaaS: the endpoints of a published RaaS, on a node of ours.

Answers of POST are {"ok": true, "result": ...}, those of faults {"ok": false, "error": ...}.
"""

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from astraflow import __version__
from astraflow.core.tasks import TaskPurpose
from astraflow.gateway.edge.bodies import answer, read_body, stream_answer
from astraflow.gateway.edge.errors import add_errors, json_answer
from astraflow.gateway.raas.node import DataflowNode
from astraflow.gateway.raas.workflows import RegisterWorkflow, Submit
from astraflow.gateway.requests import ANSWERS, Fields, LoadVersion, body_of
from astraflow.rpc.peers import caller_of

# Whoever wants to wait longer asks again.
_MAX_WAIT_S = 60.0


class Pull(Fields):
    """What has finished is wanted."""

    max_items: int = Field(default=256, ge=1, le=4096, description="Results at most.")
    timeout: float = Field(default=0.0, ge=0, strict=False, description="Seconds to wait for one.")


class Reset(Fields):
    """Training rollouts are not wanted any more."""

    timeout: float = Field(default=5.0, ge=0, le=600, strict=False, description="Seconds to wait.")


class Nothing(Fields):
    """An empty body."""


class Anything(BaseModel):
    """A body of which nothing is used."""


def raas_app(node: DataflowNode, shutdown: Callable[[], None]) -> FastAPI:
    """Return the app of a node that was entered."""
    app = FastAPI(title="astraflow gateway: RaaS", version=__version__, description=__doc__ or "")
    add_errors(app, write=_refused)
    app.include_router(_training(node))
    app.include_router(_evaluations(node))
    app.include_router(_steering(node, shutdown))
    return app


def _training(node: DataflowNode) -> APIRouter:
    router = APIRouter(tags=["Dataflow to RaaS"], responses=ANSWERS)

    @router.post("/register_workflow", openapi_extra=body_of(RegisterWorkflow))
    async def register_workflow(request: Request) -> Response:
        """Name a workflow of the recipe, with its sampling; the node has its code."""
        asked = await read_body(request, node.settings.rules, RegisterWorkflow)
        return await _result(request, node.book.register(asked))

    @router.post("/submit", openapi_extra=body_of(Submit))
    async def submit(request: Request) -> Response:
        """Take a prompt; every one of its samples comes to an end, and is pulled as one result."""
        return await _submitted(node, request, TaskPurpose.TRAIN)

    @router.post("/pull", openapi_extra=body_of(Pull))
    async def pull(request: Request) -> Response:
        """Return what has finished, and waits for up to `timeout` where nothing has.

        What its reader has not read to the end is returned again.
        """
        return await _pulled(node, request, TaskPurpose.TRAIN, list)

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

    @router.post("/eval_submit", openapi_extra=body_of(Submit))
    async def eval_submit(request: Request) -> Response:
        """Take a prompt to be measured with the newest version, and with no other."""
        return await _submitted(node, request, TaskPurpose.EVAL)

    @router.post("/eval_pull", openapi_extra=body_of(Pull))
    async def eval_pull(request: Request) -> Response:
        """Return what of evaluations has finished, and how much is open."""
        return await _pulled(node, request, TaskPurpose.EVAL, lambda items: _eval(node, items))

    @router.post("/eval_end")
    async def eval_end(request: Request) -> Response:
        """Answer: there is nothing to undo."""
        return await _marked(node, request, "eval_ended")

    return router


def _steering(node: DataflowNode, shutdown: Callable[[], None]) -> APIRouter:
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
        await read_body(request, node.settings.rules, Nothing)
        shutdown()
        return await _result(request, "shutting down")

    return router


async def _submitted(node: DataflowNode, request: Request, purpose: TaskPurpose) -> Response:
    asked = await read_body(request, node.settings.rules, Submit)
    return await _result(request, {"task_id": node.submit(asked, purpose)})


async def _pulled(
    node: DataflowNode,
    request: Request,
    purpose: TaskPurpose,
    told: Callable[[list[dict[str, Any]]], Any],
) -> Response:
    """Answer with what has finished; it is forgotten once all of the answer was written."""
    asked = await read_body(request, node.settings.rules, Pull)
    desk = node.desk
    if asked.timeout:
        await desk.until(lambda: desk.can_lend(purpose), min(asked.timeout, _MAX_WAIT_S))
    orders = desk.lend(purpose, asked.max_items)

    def ended(is_delivered: bool) -> None:
        desk.give(orders, is_delivered=is_delivered)

    return await stream_answer(
        request, {"ok": True, "result": told(node.items(orders))}, ended=ended
    )


def _eval(node: DataflowNode, items: list[dict[str, Any]]) -> dict[str, Any]:
    measure = TaskPurpose.EVAL
    return {
        "items": items,
        "inflight": node.desk.open_count(measure) - node.desk.waiting_count(measure),
        "pending": node.desk.waiting_count(measure),
        "total_submitted": node.desk.submitted_count[measure],
    }


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
