"""The endpoints of the gateway, served until its process is told to end or the run is over."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any, Final

import structlog
from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from astraflow import __version__
from astraflow.client.control import ControlClient
from astraflow.core.errors import AstraflowError
from astraflow.core.members import MemberRole, MemberState
from astraflow.core.status import RunStatus, StopMode
from astraflow.gateway.gateway import Gateway
from astraflow.gateway.http import (
    ANSWERS,
    DeregisterRaas,
    NotifyVersion,
    RegisterRaas,
    TrainerReady,
    add_errors,
    answer,
    body_of,
    read_body,
    serve_app,
    stream_answer,
)
from astraflow.gateway.settings import GatewaySettings, tls_of, url_of
from astraflow.gateway.trainer import padded
from astraflow.rpc.concurrency import interruption, switch_threads_soon
from astraflow.rpc.http import json_answer, until_disconnect
from astraflow.rpc.peers import caller_of
from astraflow.telemetry.garbage import collect_rarely, keep_for_good
from astraflow.telemetry.logging import configure_logging

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

# Peers get to know that the run is over.
_LAST_ANSWERS_S: Final = 5.0

_ABOUT: Final = """
The endpoints of AstraFlow's published services, on a run of astraflow: an existing trainer or
RaaS joins it unmodified. The gateway keeps no truth of its own: it is a client of the hub's gRPC
contract.

**Bodies.** Answers are pickled dicts unless `Accept` names `application/json` (tensors as
`{dtype, shape, data}`, base64) or `application/vnd.safetensors`. Requests are JSON; pickled
ones are read with `--legacy-pickle` only, and by a reader that runs nothing.

**Errors** are `{"error": "a sentence that names what to do"}`.
"""


@asynccontextmanager
async def serve_gateway(settings: GatewaySettings, *, port: int = 0) -> AsyncGenerator[Gateway]:
    """Serve until the end of the block; yield what is served."""
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
        ) as gateway.address:
            yield gateway


def main_gateway(settings: GatewaySettings, *, as_json: bool) -> int:
    """Serve until the run is over or the process is told to end; return the exit code."""
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
    async with serve_gateway(settings, port=settings.recipe.http.port or 0) as gateway:
        control = None if settings.operator_token is None else gateway.control
        ended = None if control is None else _run_over(control)
        url = url_of(settings.recipe.http, gateway.address)
        await until_ended(url, ended, last_s=_LAST_ANSWERS_S, as_json=as_json)


async def until_ended(
    url: str, ended: Awaitable[object] | None, *, last_s: float, as_json: bool
) -> None:
    """Say where is served and wait until told to end, or `ended`; then serve on for `last_s`."""
    stopped = stop_event()
    address = url.partition("://")[2]
    if as_json:
        print(json.dumps({"address": address}), flush=True)  # noqa: T201 - asked for
    log.info("gateway serves", address=address, docs=f"{url}/docs")
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
    # Large bodies are read on threads.
    switch_threads_soon()
    keep_for_good()
    collect_rarely()
    return interruption()


def trainer_routes(gateway: Gateway) -> APIRouter:
    """Return the endpoints of trainers."""
    router = APIRouter(tags=["Trainer to Dataflow"], responses=ANSWERS)

    @router.post("/ready", openapi_extra=body_of(TrainerReady))
    async def ready(request: Request) -> Response:
        """Join the run as the trainer of a policy.

        Answers once the first version is published: the weights of the recipe's model, or those
        that the sender holds where recovered_version is given.
        """
        asked = await read_body(request, gateway.settings.rules, TrainerReady)
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
        trainer = gateway.trainer(model_id)
        timeout_s = gateway.settings.recipe.http.batch_timeout_s
        try:
            with trainer.asking():
                received = await until_disconnect(
                    request.receive, trainer.batch(version), timeout_s=timeout_s
                )
        except ClientDisconnect:
            raise HTTPException(499, "the reader has gone") from None
        except TimeoutError:
            why = f"no batch came in {timeout_s:g} s; `astraflow explain` says why"
            raise HTTPException(504, why) from None
        columns = await asyncio.to_thread(padded, received, version_offset=trainer.offset)
        fields = {"batch": columns, "buffer_stats": dict(received.header.metrics)}

        def ended(is_delivered: bool) -> None:
            if is_delivered and trainer.batches.in_hand is received:
                trainer.batches.is_delivered = True

        return await stream_answer(request, fields, ended=ended)

    @router.post("/notify_version", openapi_extra=body_of(NotifyVersion))
    async def notify_version(request: Request) -> Response:
        """Publish the trainer's next version: its weights are fetched from the sender.

        Answers once the run knows the version; the pool loads it by and by. The batch in hand
        counts as trained on. With `run_eval` it answers once the recipe's evaluations of that
        version have ended, and with what came of them.
        """
        notify = await read_body(request, gateway.settings.rules, NotifyVersion)
        trainer = gateway.trainer(notify.model_id)
        with trainer.asking():
            is_full = await trainer.notify(notify.version)
            results = await gateway.evaluate(trainer, notify.version) if notify.run_eval else None
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
        pool, roles = _pool(run), {member.role for member in run.members}
        agent = {
            "raas_ready": MemberRole.RAAS in roles,
            "trainer_ready": MemberRole.TRAINER in roles,
            "started": run.state != "waiting",
            "version": pool["version"],
        }
        return json_answer(
            {
                "status": "error" if run.failure else "ready",
                "message": run.failure.message if run.failure else "",
                "state": run.state,
                "eval_running": False,
                "agents": {"default": agent},
                "raas_pool": pool,
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


def _pool(run: RunStatus) -> dict[str, Any]:
    instances = [
        {
            "uid": member.name,
            "url": "",
            "version": min(member.versions.values(), default=None),
            "initialized": bool(member.versions),
            "failure_count": 0,
            "last_availability": max(0, member.max_outstanding - member.outstanding_count),
            "suspect": member.state is MemberState.SUSPECT,
            "gpu_count": member.resources.accelerator_count,
        }
        for member in run.members
        if member.role is MemberRole.RAAS
    ]
    # That every policy has.
    version = min((policy.version or 0 for policy in run.policies), default=0)
    return {"size": len(instances), "version": version, "instances": instances}
