"""Trainer -> Dataflow: /ready, /batch, /notify_version, /save_buffer."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from astraflow.client.batch_stream import ReceivedBatch
from astraflow.gateway.documents import ANSWERS, body_of
from astraflow.gateway.edge.bodies import answer, parse, read_body, stream_answer
from astraflow.gateway.edge.errors import RefusedError
from astraflow.gateway.edge.peers import caller_of
from astraflow.gateway.gateway import Gateway
from astraflow.gateway.requests import NotifyVersion, Ready
from astraflow.gateway.seats.columns import padded
from astraflow.gateway.seats.seat import TrainerSeat


def trainer_routes(gateway: Gateway) -> APIRouter:
    """Return the endpoints of trainers."""
    router = APIRouter(tags=["Trainer to Dataflow"], responses=ANSWERS)
    _add_ready(router, gateway)
    _add_batch(router, gateway)
    _add_notify_version(router, gateway)
    _add_save_buffer(router)
    return router


def _add_ready(router: APIRouter, gateway: Gateway) -> None:
    @router.post("/ready", openapi_extra=body_of(Ready))
    async def ready(request: Request) -> Response:
        """Join the run as the trainer of a policy.

        Answers once the first version is published: the weights of the recipe's model, or those
        that the sender holds where recovered_version is given.
        """
        asked = parse(Ready, await read_body(request, gateway.settings.rules))
        await gateway.ready(asked, caller=caller_of(request))
        return await answer(request, {"ok": True})


def _add_batch(router: APIRouter, gateway: Gateway) -> None:
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
        received = await _waited(request, seat, version, gateway.settings.batch_timeout_s)
        return await _written(request, seat, received)


def _add_notify_version(router: APIRouter, gateway: Gateway) -> None:
    @router.post("/notify_version", openapi_extra=body_of(NotifyVersion))
    async def notify_version(request: Request) -> Response:
        """Publish the trainer's next version: its weights are fetched from the sender.

        Answers once the run knows the version; the pool loads it by and by. The batch in hand
        counts as trained on. With `run_eval` it answers once the recipe's evaluations of that
        version have ended, and with what came of them.
        """
        notify = parse(NotifyVersion, await read_body(request, gateway.settings.rules))
        seat = gateway.seat(notify.model_id)
        is_full = await seat.notify(notify.version)
        results = await gateway.evaluate(seat, notify.version) if notify.run_eval else None
        info = {"use_full": int(is_full)}
        return await answer(
            request, {"ok": True, "eval_results": results, "weight_transfer_info": info}
        )


def _add_save_buffer(router: APIRouter) -> None:
    @router.post("/save_buffer")
    async def save_buffer(request: Request) -> Response:
        """Answer at once: the hub's journal has everything, at any time."""
        return await answer(request, {"ok": True})


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
        RefusedError: 504; 499 when the reader has gone.
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
            raise RefusedError(499, "the reader has gone")
        raise RefusedError(504, f"no batch came in {timeout_s:g} s; `astraflow explain` says why")
    finally:
        taking.cancel()
        leaving.cancel()
        seat.heard()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
