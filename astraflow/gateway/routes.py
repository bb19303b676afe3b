"""The endpoints of the gateway: those of trainers, and those about the run and its pool."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from astraflow.client.batch_stream import ReceivedBatch
from astraflow.core.members import MemberRole, MemberState, MemberStatus
from astraflow.core.status import RunStatus, StopMode
from astraflow.gateway.edge.bodies import answer, read_body, stream_answer
from astraflow.gateway.edge.errors import json_answer
from astraflow.gateway.gateway import Gateway
from astraflow.gateway.requests import (
    ANSWERS,
    DeregisterRaas,
    NotifyVersion,
    Ready,
    RegisterRaas,
    body_of,
)
from astraflow.gateway.seats.batches import padded
from astraflow.gateway.seats.seat import TrainerSeat
from astraflow.rpc.peers import caller_of


def trainer_routes(gateway: Gateway) -> APIRouter:
    """Return the endpoints of trainers."""
    router = APIRouter(tags=["Trainer to Dataflow"], responses=ANSWERS)

    @router.post("/ready", openapi_extra=body_of(Ready))
    async def ready(request: Request) -> Response:
        """Join the run as the trainer of a policy.

        Answers once the first version is published: the weights of the recipe's model, or those
        that the sender holds where recovered_version is given.
        """
        asked = await read_body(request, gateway.settings.rules, Ready)
        await gateway.ready(asked, caller=caller_of(request))
        return await answer(request, {"ok": True})

    @router.get("/batch")
    async def batch(
        request: Request,
        model_id: Annotated[str | None, Query(description="The policy.")] = None,
        version: Annotated[
            int | None, Query(ge=0, lt=1 << 53, description="The trainer's step.")
        ] = None,
    ) -> Response:
        """Return a batch, padded [batch, seq], when there is one and the version is published.

        It stays the trainer's until it asks for a later version or publishes one. Whoever asks for
        the same version again gets the same batch. 504 when none came in time, 410 when the data
        has ended.
        """
        seat = gateway.seat(model_id)
        received = await _waited(
            request, seat, version, gateway.settings.recipe.http.batch_timeout_s
        )
        return await _written(request, seat, received)

    @router.post("/notify_version", openapi_extra=body_of(NotifyVersion))
    async def notify_version(request: Request) -> Response:
        """Publish the trainer's next version: its weights are fetched from the sender.

        Answers once the run knows the version; the pool loads it by and by. The batch in hand
        counts as trained on. With `run_eval` it answers once the recipe's evaluations of that
        version have ended, and with what came of them.
        """
        notify = await read_body(request, gateway.settings.rules, NotifyVersion)
        seat = gateway.seat(notify.model_id)
        is_full = await seat.notify(notify.version)
        results = await gateway.evaluate(seat, notify.version) if notify.run_eval else None
        info = {"use_full": int(is_full)}
        return await answer(
            request, {"ok": True, "eval_results": results, "weight_transfer_info": info}
        )

    @router.post("/save_buffer")
    async def save_buffer(request: Request) -> Response:
        """Answer at once: the hub's journal has everything, at any time."""
        return await answer(request, {"ok": True})

    return router


def run_routes(gateway: Gateway) -> APIRouter:
    """Return the endpoints about the run and its pool."""
    router = APIRouter(tags=["Run and pool"])

    @router.get("/status")
    async def status() -> Response:
        """Say how the run stands. Unlike the published service it says so when a run failed."""
        run = await gateway.run()
        return json_answer(
            {
                "status": "error" if run.failure else "ready",
                "message": run.failure.message if run.failure else "",
                "state": run.state,
                "eval_running": False,
                "agents": {"default": _agent(run)},
                "raas_pool": _pool(run),
            }
        )

    @router.get("/raas_pool")
    async def raas_pool() -> Response:
        """List the RaaS of the pool, those that speak gRPC included."""
        return json_answer(_pool(await gateway.run()))

    @router.post("/register_raas", openapi_extra=body_of(RegisterRaas))
    async def register_raas(request: Request) -> Response:
        """Let a RaaS that speaks HTTP join the pool; answers once it has."""
        register = await read_body(request, gateway.settings.rules, RegisterRaas)
        size = await gateway.register_raas(register, caller=caller_of(request))
        return json_answer({"ok": True, "uid": register.uid, "pool_size": size})

    @router.post("/deregister_raas", openapi_extra=body_of(DeregisterRaas))
    async def deregister_raas(request: Request) -> Response:
        """Let such a RaaS leave; what it held is issued again."""
        gone = await read_body(request, gateway.settings.rules, DeregisterRaas)
        size = await gateway.deregister_raas(gone.uid, shutdown=gone.shutdown)
        return json_answer({"ok": True, "uid": gone.uid, "pool_size": size})

    @router.post("/shutdown")
    async def shutdown(request: Request) -> Response:
        """End the run: no new prompts, what is out finishes, all members leave."""
        await gateway.control.stop_run(StopMode.DRAIN, grace_s=30.0)
        return await answer(request, {"ok": True})

    return router


async def _written(request: Request, seat: TrainerSeat, received: ReceivedBatch) -> Response:
    """Answer with a batch, and note when all of it has been written."""
    columns = await asyncio.to_thread(padded, received, version_offset=seat.offset)
    fields = {"batch": columns, "buffer_stats": dict(received.header.metrics)}

    def ended(is_delivered: bool) -> None:
        if is_delivered and seat.desk.in_hand is received:
            seat.desk.is_delivered = True

    return await stream_answer(request, fields, ended=ended)


async def _waited(
    request: Request, seat: TrainerSeat, version: int | None, timeout_s: float
) -> ReceivedBatch:
    """Wait for a batch as long as its reader does, and not for ever.

    Raises:
        HTTPException: 504; 499 when the reader has gone.
    """
    taking = asyncio.ensure_future(seat.batch(version))
    leaving = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait(
            {taking, leaving}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if taking.done():
            return taking.result()
        if leaving.done():
            raise HTTPException(499, "the reader has gone")
        raise HTTPException(504, f"no batch came in {timeout_s:g} s; `astraflow explain` says why")
    finally:
        taking.cancel()
        leaving.cancel()
        seat.heard()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _agent(run: RunStatus) -> dict[str, Any]:
    roles = {member.role for member in run.members}
    return {
        "raas_ready": MemberRole.RAAS in roles,
        "trainer_ready": MemberRole.TRAINER in roles,
        "started": run.state != "waiting",
        "version": _version(run),
    }


def _pool(run: RunStatus) -> dict[str, Any]:
    instances = [_instance(member) for member in run.members if member.role is MemberRole.RAAS]
    return {"size": len(instances), "version": _version(run), "instances": instances}


def _instance(member: MemberStatus) -> dict[str, Any]:
    return {
        "uid": member.name,
        "url": "",
        "version": min(member.versions.values(), default=None),
        "initialized": bool(member.versions),
        "failure_count": 0,
        "last_availability": max(0, member.max_outstanding - member.outstanding_count),
        "suspect": member.state is MemberState.SUSPECT,
        "gpu_count": member.resources.accelerator_count,
    }


def _version(run: RunStatus) -> int:
    """Return the version that every policy has."""
    return min((policy.version or 0 for policy in run.policies), default=0)
