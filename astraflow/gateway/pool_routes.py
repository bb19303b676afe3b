"""The run and its pool: /status, /raas_pool, /shutdown."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from astraflow.core.members import MemberState, MemberStatus, Role
from astraflow.core.status import RunStatus, StopMode
from astraflow.gateway.documents import body_of
from astraflow.gateway.edge.bodies import answer, parse, read_body
from astraflow.gateway.edge.errors import json_answer
from astraflow.gateway.edge.peers import caller_of
from astraflow.gateway.gateway import Gateway
from astraflow.gateway.requests import DeregisterRaas, RegisterRaas


def pool_routes(gateway: Gateway) -> APIRouter:
    """Return the endpoints about the run and its pool."""
    router = APIRouter(tags=["Run and pool"])
    rules = gateway.settings.rules

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
        register = parse(RegisterRaas, await read_body(request, rules))
        size = await gateway.register_raas(register, caller=caller_of(request))
        return json_answer({"ok": True, "uid": register.uid, "pool_size": size})

    @router.post("/deregister_raas", openapi_extra=body_of(DeregisterRaas))
    async def deregister_raas(request: Request) -> Response:
        """Let such a RaaS leave; what it held is issued again."""
        gone = parse(DeregisterRaas, await read_body(request, rules))
        size = await gateway.deregister_raas(gone.uid, shutdown=gone.shutdown)
        return json_answer({"ok": True, "uid": gone.uid, "pool_size": size})

    @router.post("/shutdown")
    async def shutdown(request: Request) -> Response:
        """End the run: no new prompts, what is out finishes, all members leave."""
        await gateway.control.stop_run(StopMode.DRAIN, grace_s=30.0)
        return await answer(request, {"ok": True})

    return router


def _agent(run: RunStatus) -> dict[str, Any]:
    roles = {member.role for member in run.members}
    return {
        "raas_ready": Role.RAAS in roles,
        "trainer_ready": Role.TRAINER in roles,
        "started": run.state != "waiting",
        "version": _version(run),
    }


def _pool(run: RunStatus) -> dict[str, Any]:
    instances = [_instance(member) for member in run.members if member.role is Role.RAAS]
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
