"""RaaS -> Trainer: the weight sender's endpoints, all JSON, as published."""

import asyncio
from typing import Any, Literal

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response
from pydantic import Field

from astraflow import __version__
from astraflow.core.errors import AstraflowError
from astraflow.gateway.documents import body_of
from astraflow.gateway.edge.bodies import BodyRules, json_answer, parse, read_body
from astraflow.gateway.edge.errors import RefusedError, add_errors
from astraflow.gateway.legacy.held import HeldVersion, Sender
from astraflow.gateway.legacy.pusher import Instance, Pusher
from astraflow.gateway.requests import Fields


class RequestTransfer(Fields):
    """A receiver wants weights."""

    instance_id: str = Field(description="host:port that it registered as sglang_http.")
    mode: Literal["full", "delta"] = "full"


def sender_app(sender: Sender, pusher: Pusher, rules: BodyRules) -> FastAPI:
    """Return the app of one sender."""
    app = FastAPI(title="astraflow gateway: weight sender", version=__version__)
    add_errors(app)
    app.include_router(sender_routes(sender, pusher, rules))
    return app


def sender_routes(sender: Sender, pusher: Pusher, rules: BodyRules) -> APIRouter:
    """Return the endpoints of one sender."""
    router = APIRouter(tags=["RaaS to Trainer"])
    instances: dict[str, Instance] = {}
    sending = asyncio.Lock()

    @router.get("/get_version")
    async def get_version() -> Response:
        """Return the version that is sent."""
        return json_answer({"version": sender.require().version})

    @router.get("/get_buffer_info")
    async def get_buffer_info() -> Response:
        """Return the tensors in the order in which they are sent; 503 before there are any."""
        return json_answer(sender.require().plan.to_json())

    @router.get("/get_capabilities")
    async def get_capabilities() -> Response:
        """Return what can be sent: always all weights, and the delta from the version before."""
        return json_answer(_capabilities(sender.require()))

    @router.post("/register_sglang_instance", openapi_extra=body_of(Instance))
    async def register_sglang_instance(request: Request) -> Response:
        """Register a receiver: where pushes and the completion message go."""
        instance = parse(Instance, await read_body(request, rules))
        _ = instance.addresses
        instances[instance.instance_id] = instance
        return json_answer(
            {
                "trainer_global_rank": 0,
                "trainer_world_size": 1,
                "trainer_session_ids": [],
                "trainer_buffer_ptr": 0,
                "trainer_buffer_length": sender.require().plan.nbytes,
                "trainer_hostname": "",
                "trainer_rpc_port": 0,
            }
        )

    @router.post("/request_transfer", openapi_extra=body_of(RequestTransfer))
    async def request_transfer(request: Request) -> Response:
        """Push weights to a receiver; answers once it has acknowledged every byte."""
        asked = parse(RequestTransfer, await read_body(request, rules))
        instance = _instance(instances, asked.instance_id)
        async with sending:
            return json_answer(await _transfer(sender.require(), instance, asked.mode, pusher))

    return router


def _instance(instances: dict[str, Instance], instance_id: str) -> Instance:
    known = instances.get(instance_id)
    if known is None and len(instances) == 1:
        # The published description does not say what receivers call themselves.
        [known] = instances.values()
    if known is None:
        raise RefusedError(404, f"{instance_id} is not registered: POST /register_sglang_instance")
    return known


async def _transfer(
    held: HeldVersion, instance: Instance, mode: str, pusher: Pusher
) -> dict[str, Any]:
    payload = held.flat if mode == "full" else held.delta
    if payload is None:
        why = f"version {held.version} has no delta from the one before"
        return {"ok": False, "fallback": "full", "reason": why}
    if len(payload) > instance.buffer_length:
        why = f"{len(payload)} bytes do not fit a buffer of {instance.buffer_length}"
        return {"ok": False, "error": why}
    try:
        await pusher.send(instance, payload)
    except AstraflowError as error:
        return {"ok": False, "error": error.message}
    answer: dict[str, Any] = {"ok": True, "version": held.version, "mode": mode}
    return answer | (_delta(held) | {"compute_time": 0.0} if mode == "delta" else {})


def _capabilities(held: HeldVersion) -> dict[str, Any]:
    known: dict[str, Any] = {"strategies": ["full", "delta"], "version": held.version}
    if held.delta is None:
        return known | {"delta_ready": False}
    return known | {
        "delta_ready": True,
        "delta_base_version": held.version - 1,
        "delta_version": held.version,
        "delta_sparsity": _sparsity(held),
        "delta_num_nonzero": held.changed_count,
        "delta_size_bytes": len(held.delta),
    }


def _delta(held: HeldVersion) -> dict[str, Any]:
    return {
        "delta_base_version": held.version - 1,
        "delta_size": 0 if held.delta is None else len(held.delta),
        "sparsity": _sparsity(held),
        "num_nonzero": held.changed_count,
    }


def _sparsity(held: HeldVersion) -> float:
    return 1.0 - held.changed_count / max(1, held.plan.nbytes // 2)
