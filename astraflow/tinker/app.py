"""The server: bodies are read and bounded here, errors become answers, until the process ends."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any, Final, TypeVar

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from astraflow.core.errors import AstraflowError, Reason
from astraflow.rpc.concurrency import interruption
from astraflow.rpc.http import HttpLimits, HttpServer, behind_secret, json_answer
from astraflow.telemetry.logging import configure_logging
from astraflow.tinker.checkpoints import TinkerCheckpoints, require_id
from astraflow.tinker.learner import LoadedBase, TinkerSettings
from astraflow.tinker.promises import Promise, Promises, digest_of
from astraflow.tinker.requests import (
    CreateModel,
    CreateSamplingSession,
    LoadWeights,
    OfModel,
    OptimStep,
    RetrieveFuture,
    SampleRequest,
    SaveWeights,
    SaveWeightsForSampler,
)
from astraflow.tinker.samplers import Samplers
from astraflow.tinker.service import Service
from astraflow.tinker.wire import read_request
from astraflow.trainers.causal_model import prepare_torch

_PREFIX: Final = "/api/v1"

# Clients wait for 45 s, and ask again at once.
_HOLD_S: Final = 30.0
_MAX_BODY_NBYTES: Final = 64 << 20
_BODIES_NBYTES: Final = 1 << 30
_BODY_S: Final = 60.0

# A larger one is parsed beside the event loop.
_QUICK_NBYTES: Final = 1 << 16

_STATUS: Final = {
    Reason.INVALID_FIELD: 400,
    Reason.CAPABILITY_MISSING: 400,
    Reason.CONTEXT_TOO_LONG: 400,
    Reason.MODEL_MISMATCH: 400,
    Reason.TOKEN_INVALID: 401,
    Reason.POLICY_UNKNOWN: 404,
    Reason.CHECKPOINT_UNKNOWN: 404,
    Reason.SOURCE_TIMEOUT: 408,
    Reason.REQUEST_CONFLICT: 409,
    Reason.NAME_TAKEN: 409,
    Reason.TASK_EXPIRED: 410,
    Reason.MESSAGE_TOO_LARGE: 413,
    Reason.OVERLOADED: 429,
    Reason.ENGINE_FAILED: 503,
    Reason.NOT_READY: 503,
}

FieldsT = TypeVar("FieldsT", bound=BaseModel)

Handler = Callable[[Request], Awaitable[Response]]

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class _OfSession(BaseModel):
    """Of a client about itself; only what is used is looked at."""

    model_config = ConfigDict(strict=True, extra="ignore")

    session_id: Annotated[str, Field(max_length=200)]


class _Head(BaseModel):
    """What says whose turn it is, in a request that is wrong otherwise."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    model_id: Annotated[str, Field(max_length=4096)]
    seq_id: Annotated[int, Field(ge=1, lt=1 << 31)]


class TinkerApp:
    """The routes of a service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._held_nbytes = 0

    def asgi(self, token: str = "") -> ASGIApp:
        """Return the app; every request shows the token as X-API-Key, if there is one."""
        posts: dict[str, Handler] = {
            "client/config": self._answering({}),
            "client/dynamic_config": self._answering({}),
            "telemetry": self._answering({"status": "accepted"}),
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions/{session_id}/finish": self._finish,
            "create_model": self._create_model,
            "unload_model": self._unload,
            "get_info": self._info,
            "forward_backward": self._forward_backward,
            "optim_step": self._ordered(OptimStep, self._service.optim_step),
            "save_weights": self._ordered(SaveWeights, self._service.save_weights),
            "save_weights_for_sampler": self._ordered(
                SaveWeightsForSampler, self._service.save_weights_for_sampler
            ),
            "load_weights": self._ordered(LoadWeights, self._service.load_weights),
            "create_sampling_session": self._create_sampling_session,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
        }
        model = {
            "model_name": self._service.base_model,
            "max_context_length": self._service.max_context,
            "trainable": True,
            "sampleable": True,
        }
        gets: dict[str, Handler] = {
            "healthz": self._answering({"status": "ok"}),
            "get_server_capabilities": self._answering({"supported_models": [model]}),
            "samplers/{sampler_id}": self._sampler,
        }
        routes = [
            Route(f"{_PREFIX}/{path}", _guarded(handler), methods=[method])
            for method, handlers in (("POST", posts), ("GET", gets))
            for path, handler in handlers.items()
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: _no_route})
        if not token:
            return app
        refused = AstraflowError(Reason.TOKEN_INVALID, "show the key of this server: X-API-Key")
        return behind_secret(
            app,
            secret=token,
            shown=lambda headers: headers.get("x-api-key", ""),
            refused=_failed(refused),
        )

    def _answering(self, fields: dict[str, Any]) -> Handler:
        async def answer(request: Request) -> Response:
            await self._body(request)
            return json_answer(fields)

        return answer

    async def _create_session(self, request: Request) -> Response:
        await self._body(request)
        session_id = f"session-{secrets.token_hex(12)}"
        self._service.hear(session_id)
        return json_answer({"type": "create_session", "session_id": session_id})

    async def _heartbeat(self, request: Request) -> Response:
        self._service.hear((await self._parsed(request, _OfSession)).session_id)
        return json_answer({"type": "session_heartbeat"})

    async def _finish(self, request: Request) -> Response:
        await self._body(request)
        self._service.finish(require_id(request.path_params["session_id"]))
        return json_answer({})

    async def _unload(self, request: Request) -> Response:
        model_id = (await self._parsed(request, OfModel)).model_id
        return _promised(self._service.unload(model_id))

    async def _info(self, request: Request) -> Response:
        return json_answer(
            await self._service.info((await self._parsed(request, OfModel)).model_id)
        )

    async def _create_model(self, request: Request) -> Response:
        body = await self._body(request)
        return _promised(self._service.create_model(_parse(CreateModel, body), digest_of(body)))

    async def _forward_backward(self, request: Request) -> Response:
        body = await self._body(request)
        if request.headers.get("content-encoding", "identity") != "identity":
            raise AstraflowError(Reason.INVALID_FIELD, "bodies are not compressed here")
        message = await asyncio.to_thread(read_request, body)
        digest = await asyncio.to_thread(digest_of, body)
        return _promised(self._service.forward_backward(message, digest, nbytes=len(body)))

    async def _create_sampling_session(self, request: Request) -> Response:
        fields = await self._parsed(request, CreateSamplingSession)
        sampler_id = await self._service.create_sampling_session(fields)
        return json_answer({"type": "create_sampling_session", "sampling_session_id": sampler_id})

    async def _sampler(self, request: Request) -> Response:
        return json_answer(await self._service.sampler(request.path_params["sampler_id"]))

    async def _sample(self, request: Request) -> Response:
        body = await self._body(request)
        if len(body) > _QUICK_NBYTES:
            fields = await asyncio.to_thread(_parse, SampleRequest, body)
        else:
            fields = _parse(SampleRequest, body)
        promise = self._service.sample(fields, digest_of(body), nbytes=len(body))
        ids = [f"{promise.request_id}-{index}" for index in range(fields.num_samples)]
        return json_answer({"request_id": promise.request_id, "sample_sequence_ids": ids})

    async def _retrieve(self, request: Request) -> Response:
        request_id = (await self._parsed(request, RetrieveFuture)).request_id
        answer = await self._service.promises.answer(request_id, hold_s=_HOLD_S)
        if answer is None:
            later = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return json_answer(later)
        return answer

    def _ordered(self, kind: type[FieldsT], act: Callable[[FieldsT, bytes], Promise]) -> Handler:
        """Have a request done; a wrong one has its turn, too, where it says which that is."""

        async def answer(request: Request) -> Response:
            body = await self._body(request)
            digest = digest_of(body)
            try:
                fields = _parse(kind, body)
            except AstraflowError as error:
                try:
                    head = _Head.model_validate_json(body)
                except ValidationError:
                    raise error from None
                return _promised(self._service.refuse(head.model_id, head.seq_id, digest, error))
            return _promised(act(fields, digest))

        return answer

    async def _parsed(self, request: Request, kind: type[FieldsT]) -> FieldsT:
        return _parse(kind, await self._body(request))

    async def _body(self, request: Request) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout(_BODY_S):
                async for part in request.stream():
                    self._held_nbytes += len(part)
                    body += part
                    if len(body) > _MAX_BODY_NBYTES:
                        why = f"a body has at most {_MAX_BODY_NBYTES} bytes here"
                        raise AstraflowError(Reason.MESSAGE_TOO_LARGE, why)
                    if self._held_nbytes > _BODIES_NBYTES:
                        why = "too many bodies come at once; send it again"
                        raise AstraflowError(Reason.OVERLOADED, why)
        except TimeoutError:
            raise AstraflowError(
                Reason.SOURCE_TIMEOUT, f"the body did not come in {_BODY_S:g} s"
            ) from None
        finally:
            self._held_nbytes -= len(body)
        return bytes(body)


def _guarded(handler: Handler) -> Handler:
    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except AstraflowError as error:
            return _failed(error)
        except ClientDisconnect:
            return Response(status_code=499)
        except asyncio.CancelledError:
            # The process ends; nobody else cancels a request.
            return _failed(AstraflowError(Reason.NOT_READY, "the server ends", retryable=True))
        except Exception:
            log.exception("a request broke", path=request.url.path)
            return _failed(AstraflowError(Reason.INTERNAL, "the server failed; its log says why"))

    return answer


def _parse(kind: type[FieldsT], body: bytes) -> FieldsT:
    try:
        return kind.model_validate_json(body or b"{}")
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        told = [f"{'.'.join(map(str, each['loc'])) or 'body'}: {each['msg']}" for each in faults]
        raise AstraflowError(Reason.INVALID_FIELD, "; ".join(told)[:2000]) from None


def _promised(promise: Promise) -> Response:
    return json_answer({"request_id": promise.request_id})


def _failed(error: AstraflowError) -> Response:
    fields = {"error": error.message, "detail": error.message, "reason": str(error.reason)}
    return json_answer(fields, _STATUS.get(error.reason, 500))


async def _no_route(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    told = f"{request.method} {request.url.path} is not served here"
    return json_answer({"error": told, "detail": told}, status)


_CONNECTIONS, _HOST_CONNECTIONS = 8192, 4096


def main_tinker(settings: TinkerSettings, *, as_json: bool) -> int:
    """Serve until SIGINT or SIGTERM; return the exit code."""
    configure_logging("tinker")
    try:
        asyncio.run(_serve(settings, as_json=as_json))
    except AstraflowError as error:
        log.error("the server failed", reason=error.reason, why=error.message)  # noqa: TRY400
        return 1
    return 0


async def _serve(settings: TinkerSettings, *, as_json: bool) -> None:
    stopped = interruption()
    async with serving(settings) as address:
        if as_json:
            print(json.dumps({"address": address}), flush=True)  # noqa: T201 - asked for
        log.info("serves", base_model=settings.base_model, base_url=f"http://{address}")
        await stopped.wait()


@asynccontextmanager
async def serving(settings: TinkerSettings) -> AsyncGenerator[str]:
    """Serve for a block; yield host:port.

    Raises:
        AstraflowError: INVALID_FIELD for a model, settings or an address that cannot be served.
    """
    engine = settings.engine
    prepare_torch(thread_count=engine.thread_count)
    base = await asyncio.to_thread(LoadedBase, settings)
    samplers = Samplers(
        settings.model_dir, engine, layer_shapes=base.layer_shapes, max_rank=settings.max_rank
    )
    checkpoints = TinkerCheckpoints(
        settings.directory, base_model=settings.base_model, now=time.time
    )
    try:
        async with asyncio.TaskGroup() as tasks:
            service = Service(
                base,
                samplers,
                checkpoints,
                Promises(tasks),
                base_model=settings.base_model,
                max_rank=settings.max_rank,
            )
            server = await HttpServer.start(
                TinkerApp(service).asgi(settings.token),
                listen=settings.listen,
                limits=HttpLimits(
                    connection_count=_CONNECTIONS, host_connection_count=_HOST_CONNECTIONS
                ),
                tls=settings.tls,
            )
            try:
                yield server.address
            finally:
                service.close()
                await server.close()
    finally:
        await samplers.close()
