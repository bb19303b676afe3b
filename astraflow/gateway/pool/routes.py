"""Dataflow -> RaaS: the endpoints of a published RaaS, on our nodes.

Answers of POST are {"ok": true, "result": ...}, those of faults {"ok": false, "error": ...}.
"""

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response

from astraflow import __version__
from astraflow.core.tasks import TaskPurpose
from astraflow.gateway.documents import ANSWERS, body_of
from astraflow.gateway.edge.bodies import answer, parse, read_body, stream_answer
from astraflow.gateway.edge.errors import RefusedError, add_errors, json_answer
from astraflow.gateway.edge.peers import caller_of
from astraflow.gateway.pool.pool import DataflowPool
from astraflow.gateway.pool.requests import (
    LoadVersion,
    Nothing,
    Pull,
    RegisterWorkflow,
    Reset,
    Submit,
)

# Whoever wants to wait longer asks again.
_MAX_WAIT_S = 60.0


def pool_app(pool: DataflowPool, shutdown: Callable[[], None]) -> FastAPI:
    """Return the app of a pool that was entered."""
    app = FastAPI(title="astraflow gateway: RaaS", version=__version__, description=__doc__ or "")
    add_errors(app, write=_refused)
    app.include_router(look_routes(pool))
    app.include_router(work_routes(pool))
    app.include_router(eval_routes(pool))
    app.include_router(steering_routes(pool, shutdown))
    return app


def look_routes(pool: DataflowPool) -> APIRouter:
    """Return what is read, as JSON."""
    router = APIRouter(tags=["Dataflow to RaaS"])

    @router.get("/status")
    async def status() -> Response:
        """Say how the pool stands: ready while a node of it has weights."""
        return json_answer(pool.status())

    @router.get("/availability")
    async def availability() -> Response:
        """Say how many more prompts there is room for."""
        return json_answer(pool.availability())

    return router


def work_routes(pool: DataflowPool) -> APIRouter:
    """Return the endpoints of training."""
    router = APIRouter(tags=["Dataflow to RaaS"], responses=ANSWERS)

    @router.post("/register_workflow", openapi_extra=body_of(RegisterWorkflow))
    async def register_workflow(request: Request) -> Response:
        """Name a workflow of the recipe, with its sampling; nodes have its code."""
        asked = parse(RegisterWorkflow, await read_body(request, pool.settings.rules))
        return await _result(request, pool.book.register(asked))

    @router.post("/submit", openapi_extra=body_of(Submit))
    async def submit(request: Request) -> Response:
        """Take a prompt; every one of its samples comes to an end, and is pulled as one result."""
        return await _submitted(pool, request, TaskPurpose.TRAIN)

    @router.post("/pull", openapi_extra=body_of(Pull))
    async def pull(request: Request) -> Response:
        """Return what has finished, and waits for up to `timeout` where nothing has.

        What its reader has not read to the end is returned again.
        """
        return await _pulled(pool, request, TaskPurpose.TRAIN, list)

    return router


def eval_routes(pool: DataflowPool) -> APIRouter:
    """Return the endpoints of evaluations."""
    router = APIRouter(tags=["Evaluations"], responses=ANSWERS)

    @router.post("/reset_training_engine", openapi_extra=body_of(Reset))
    async def reset_training_engine(request: Request) -> Response:
        """Cancel training rollouts and drop what of them was not pulled."""
        asked = parse(Reset, await read_body(request, pool.settings.rules))
        return await _result(request, await pool.reset(asked.timeout))

    @router.post("/eval_start")
    async def eval_start(request: Request) -> Response:
        """Answer: evaluations need no preparation, and training goes on beside them."""
        return await _marked(pool, request, "eval_started")

    @router.post("/eval_submit", openapi_extra=body_of(Submit))
    async def eval_submit(request: Request) -> Response:
        """Take a prompt to be measured with the newest version, and with no other."""
        return await _submitted(pool, request, TaskPurpose.EVAL)

    @router.post("/eval_pull", openapi_extra=body_of(Pull))
    async def eval_pull(request: Request) -> Response:
        """Return what of evaluations has finished, and how much is open."""
        return await _pulled(pool, request, TaskPurpose.EVAL, lambda items: _eval(pool, items))

    @router.post("/eval_end")
    async def eval_end(request: Request) -> Response:
        """Answer: there is nothing to undo."""
        return await _marked(pool, request, "eval_ended")

    return router


def steering_routes(pool: DataflowPool, shutdown: Callable[[], None]) -> APIRouter:
    """Return what changes the pool."""
    router = APIRouter(tags=["Dataflow to RaaS"], responses=ANSWERS)

    @router.post("/notify_version", openapi_extra=body_of(LoadVersion))
    async def notify_version(request: Request) -> Response:
        """Fetch a version from the trainer's sender; answers once every node samples with it."""
        asked = parse(LoadVersion, await read_body(request, pool.settings.rules))
        return await _result(request, await pool.load(asked, caller=caller_of(request)))

    @router.post("/shutdown")
    async def end(request: Request) -> Response:
        """End the pool: nodes leave."""
        parse(Nothing, await read_body(request, pool.settings.rules))
        shutdown()
        return await _result(request, "shutting down")

    return router


async def _submitted(pool: DataflowPool, request: Request, purpose: TaskPurpose) -> Response:
    asked = parse(Submit, await read_body(request, pool.settings.rules))
    return await _result(request, {"task_id": pool.submit(asked, purpose)})


async def _pulled(
    pool: DataflowPool,
    request: Request,
    purpose: TaskPurpose,
    told: Callable[[list[dict[str, Any]]], Any],
) -> Response:
    """Answer with what has finished; it is forgotten once all of the answer was written."""
    asked = parse(Pull, await read_body(request, pool.settings.rules))
    desk = pool.desk
    if asked.timeout:
        await desk.until(lambda: desk.can_lend(purpose), min(asked.timeout, _MAX_WAIT_S))
    orders = desk.lend(purpose, asked.max_items)

    def ended(is_delivered: bool) -> None:
        desk.give(orders, is_delivered=is_delivered)

    return await stream_answer(
        request, {"ok": True, "result": told(pool.items(orders))}, ended=ended
    )


def _eval(pool: DataflowPool, items: list[dict[str, Any]]) -> dict[str, Any]:
    measure = TaskPurpose.EVAL
    return {
        "items": items,
        "inflight": pool.desk.open_count(measure) - pool.desk.waiting_count(measure),
        "pending": pool.desk.waiting_count(measure),
        "total_submitted": pool.desk.submitted_count[measure],
    }


async def _marked(pool: DataflowPool, request: Request, status: str) -> Response:
    await read_body(request, pool.settings.rules)
    return await _result(request, {"status": status})


async def _result(request: Request, result: Any) -> Response:
    return await answer(request, {"ok": True, "result": result})


async def _refused(request: Request, status: int, fields: dict[str, Any]) -> Response:
    """Answer a fault as published, in the envelope of all answers."""
    if request.method == "GET":
        return json_answer(fields, status)
    try:
        return await answer(request, {"ok": False, **fields}, status=status)
    except RefusedError:
        return json_answer({"ok": False, **fields}, status)
