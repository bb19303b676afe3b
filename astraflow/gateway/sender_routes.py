"""RaaS -> Trainer: the weight sender's endpoints, all JSON, as published."""

import asyncio
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import Field
from starlette.exceptions import HTTPException

from astraflow import __version__
from astraflow.core.errors import AstraflowError
from astraflow.gateway.edge.bodies import BodyRules, json_answer, read_body
from astraflow.gateway.edge.errors import add_errors
from astraflow.gateway.legacy.sending import Instance, Offer, Pusher, Sender, Target
from astraflow.gateway.requests import Fields, body_of
from astraflow.rpc.peers import DialRules, caller_of


class RequestTransfer(Fields):
    """A receiver wants weights."""

    instance_id: str = Field(description="host:port that it registered as sglang_http.")
    mode: Literal["full", "delta"] = "full"


# Nobody has more RaaS; strangers may not fill the memory with names.
_MOST_RECEIVERS = 4096


def sender_app(sender: Sender, pusher: Pusher, rules: BodyRules, dial: DialRules) -> FastAPI:
    """Return the app of one sender."""
    app = FastAPI(title="astraflow gateway: weight sender", version=__version__)
    add_errors(app)
    sending = asyncio.Lock()

    @app.get("/get_version")
    async def get_version() -> Response:
        """Return the version that is sent."""
        return json_answer({"version": sender.require().number})

    @app.get("/get_buffer_info")
    async def get_buffer_info() -> Response:
        """Return the tensors in the order in which they are sent; 503 before there are any."""
        return json_answer(sender.require().held.plan.to_json())

    @app.get("/get_capabilities")
    async def get_capabilities() -> Response:
        """Return what can be sent: always all weights, and the delta from the version before."""
        return json_answer(_capabilities(sender.require()))

    @app.post("/register_sglang_instance", openapi_extra=body_of(Instance))
    async def register_sglang_instance(request: Request) -> Response:
        """Register a receiver: where pushes and the completion message go."""
        instance = await read_body(request, rules, Instance)
        target = await instance.target(dial.also(caller_of(request)))
        nbytes = sender.require().held.plan.nbytes
        if instance.buffer_length != nbytes:
            why = f"the weights take {nbytes} bytes, the buffer has {instance.buffer_length}"
            raise HTTPException(422, f"buffer_length: {why}")
        if len(pusher.receivers) >= _MOST_RECEIVERS:
            raise HTTPException(409, f"{_MOST_RECEIVERS} receivers are registered already")
        pusher.receivers[sender.policy_id, instance.instance_id] = target
        return json_answer(
            {
                "trainer_global_rank": 0,
                "trainer_world_size": 1,
                # Receivers ask again until this is not empty; they use it for nothing else.
                "trainer_session_ids": [[sender.policy_id]],
                "trainer_buffer_ptr": 0,
                "trainer_buffer_length": nbytes,
                "trainer_hostname": "",
                "trainer_rpc_port": 0,
            }
        )

    @app.post("/request_transfer", openapi_extra=body_of(RequestTransfer))
    async def request_transfer(request: Request) -> Response:
        """Push weights to a receiver; answers once it has acknowledged every byte."""
        asked = await read_body(request, rules, RequestTransfer)
        # Names of a receiver in answers of published ones have the scheme.
        instance_id = asked.instance_id.removeprefix("http://")
        target = pusher.receivers.get((sender.policy_id, instance_id))
        if target is None:
            why = f"{instance_id} is not registered: POST /register_sglang_instance"
            raise HTTPException(404, why)
        async with sending:
            return json_answer(await _transfer(sender, target, asked.mode, pusher))

    return app


async def _transfer(sender: Sender, target: Target, mode: str, pusher: Pusher) -> dict[str, Any]:
    offer = sender.require()
    payload = offer.held.flat if mode == "full" else offer.delta
    if payload is None:
        why = f"version {offer.number} has no delta from what this receiver holds"
        return {"ok": False, "fallback": "full", "reason": why}
    try:
        await pusher.send(target, payload)
    except AstraflowError as error:
        return {"ok": False, "error": error.message}
    sender.pushed = offer.number
    answer: dict[str, Any] = {"ok": True, "version": offer.number, "mode": mode}
    if mode == "full":
        return answer
    return answer | {
        "delta_base_version": offer.base,
        "delta_size": len(payload),
        "sparsity": _sparsity(offer),
        "num_nonzero": offer.held.changed_count,
        "compute_time": 0.0,
    }


def _capabilities(offer: Offer) -> dict[str, Any]:
    known: dict[str, Any] = {"strategies": ["full", "delta"], "version": offer.number}
    if offer.delta is None:
        return known | {"delta_ready": False}
    return known | {
        "delta_ready": True,
        "delta_base_version": offer.base,
        "delta_version": offer.number,
        "delta_sparsity": _sparsity(offer),
        "delta_num_nonzero": offer.held.changed_count,
        "delta_size_bytes": len(offer.delta),
    }


def _sparsity(offer: Offer) -> float:
    return 1.0 - offer.held.changed_count / max(1, offer.held.plan.nbytes // 2)
