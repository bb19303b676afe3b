"""The HTTP edge: how apps are served, bodies read by content type, answers and errors written.

Without Accept an answer has the published format, a pickled dict. The others are JSON, with
tensors as {dtype, shape, data} (base64 of raw little-endian bytes), and safetensors, with all that
is no tensor as one JSON text under `json` in the metadata. An error is a status and {error}.
"""

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Final, TypeVar, cast
from urllib.parse import urlsplit

import numpy as np
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response, StreamingResponse
from grpc import StatusCode
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from astraflow.codec.pickles import pickle_chunks, read_pickle
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tensors import Dtype
from astraflow.rpc.address import join_address, split_address
from astraflow.rpc.errors import STATUS
from astraflow.rpc.http import HttpLimits, HttpServer, bearer_of, behind_secret, json_answer
from astraflow.rpc.peers import caller_of
from astraflow.rpc.reading import JSON_NBYTES, ReadBudget, read, read_json
from astraflow.rpc.tls import Tls

_BY_REASON: Final = {Reason.MESSAGE_TOO_LARGE: 413, Reason.RUN_ENDED: 410}

_BY_STATUS: Final = {
    StatusCode.INVALID_ARGUMENT: 422,
    StatusCode.UNAUTHENTICATED: 401,
    StatusCode.PERMISSION_DENIED: 403,
    StatusCode.RESOURCE_EXHAUSTED: 429,
    StatusCode.UNAVAILABLE: 503,
    StatusCode.DEADLINE_EXCEEDED: 504,
    StatusCode.NOT_FOUND: 404,
    StatusCode.ALREADY_EXISTS: 409,
    StatusCode.FAILED_PRECONDITION: 409,
    StatusCode.CANCELLED: 409,
    StatusCode.DATA_LOSS: 502,
    StatusCode.INTERNAL: 500,
    StatusCode.UNIMPLEMENTED: 501,
}

# Of a sentence on what is wrong: a body may have a million wrong fields.
_TOLD_COUNT: Final = 2000


def add_errors(
    app: FastAPI,
    write: Callable[[Request, int, dict[str, Any]], Awaitable[Response]] | None = None,
) -> None:
    """Answer every error of an app; `write` makes the answer of a status and its fields."""

    async def respond(request: Request, error: Exception) -> Response:
        status, fields = _fields_of(error)
        answer = (
            json_answer(fields, status) if write is None else await write(request, status, fields)
        )
        if isinstance(error, HTTPException) and error.headers:
            answer.headers.update(error.headers)
        return answer

    for kind in (AstraflowError, HTTPException, RequestValidationError, MemoryError, Exception):
        app.add_exception_handler(kind, respond)


def _fields_of(error: Exception) -> tuple[int, dict[str, Any]]:
    match error:
        case AstraflowError(reason=reason):
            status = _BY_REASON.get(reason) or _BY_STATUS[STATUS[reason]]
            return status, {"error": error.message, "reason": str(reason)}
        case HTTPException():
            return error.status_code, {"error": error.detail}
        case RequestValidationError():
            # By the names of the fields, as pydantic tells it.
            faults = [
                f"{'.'.join(map(str, each['loc'])) or 'body'}: {each['msg']}"
                for each in error.errors()
            ]
            return 422, {"error": "; ".join(faults)[:_TOLD_COUNT]}
        case MemoryError():
            why = "the gateway has no memory for this"
            return 503, {"error": why, "reason": "MEMORY_EXCEEDED"}
        case _:
            return 500, {"error": "the gateway failed; its log says why"}


PICKLE: Final = "application/octet-stream"
JSON: Final = "application/json"
SAFETENSORS: Final = "application/vnd.safetensors"
_WRITE_NBYTES: Final = 1 << 20

# Fewer are read at once.
_QUICK_JSON_NBYTES: Final = 1 << 14
_QUICK_PICKLE_NBYTES: Final = 1 << 11

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyRules:
    """What a request may be.

    Attributes:
        reads_pickles: Whether pickled bodies are read (`--legacy-pickle`).
        max_nbytes: Of one.
        room: What of them is in memory.
        timeout_s: Seconds in which all of a body must come.
        head_timeout_s: Seconds in which a head must come.
    """

    reads_pickles: bool = False
    max_nbytes: int = 64 << 20
    room: ReadBudget = field(default_factory=ReadBudget)
    timeout_s: float = 60.0
    head_timeout_s: float = 10.0


async def read_body(request: Request, rules: BodyRules, model: type[Model]) -> Model:
    """Return the fields of a request, none for an empty body, as a model.

    Raises:
        HTTPException: 413, 408, 415, 400.
        RequestValidationError: Naming every field that is wrong.
    """
    kind = request.headers.get("content-type", PICKLE).partition(";")[0].strip().lower()
    async with _taken(request, rules) as raw:
        if raw and kind not in (JSON, PICKLE):
            raise HTTPException(415, f"a body is {JSON} or {PICKLE}, not {kind}")
        if kind == JSON and len(raw) > JSON_NBYTES:
            raise HTTPException(413, f"a body of JSON has at most {JSON_NBYTES} bytes here")
        if raw and kind == PICKLE and not rules.reads_pickles:
            why = "pickled bodies are read only where the gateway was started with --legacy-pickle"
            raise HTTPException(415, f"{why} (http.legacy_pickle in a recipe); or send {JSON}")
        quick_nbytes = _QUICK_JSON_NBYTES if kind == JSON else _QUICK_PICKLE_NBYTES
        return await read(partial(_parsed, kind, model), raw, quick_nbytes=quick_nbytes)


def _parsed(kind: str, model: type[Model], raw: bytearray) -> Model:
    """Read and look at fields in one go: what is wrong is freed where it was read."""
    try:
        fields: Any = (read_json if kind == JSON else read_pickle)(raw) if raw else {}
    except ValueError as error:
        raise HTTPException(400, f"the body is no JSON: {error}") from None
    except AstraflowError as error:
        raise HTTPException(400, error.message) from None
    if not isinstance(fields, dict):
        raise HTTPException(400, "the body must be a dict")
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False, include_input=False)
    # Here the error, which holds the fields, is no context of the next one.
    raise RequestValidationError(faults)


@asynccontextmanager
async def _taken(request: Request, rules: BodyRules) -> AsyncGenerator[bytearray]:
    """Read the bytes of a body; they take room until the end of the block."""
    too_large = HTTPException(413, f"a body has at most {rules.max_nbytes} bytes here")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > rules.max_nbytes:
        raise too_large
    raw, held, caller = bytearray(), 0, caller_of(request)
    try:
        async with asyncio.timeout(rules.timeout_s):
            async for part in request.stream():
                if len(raw) + len(part) > rules.max_nbytes:
                    raise too_large
                held = rules.room.reserve(caller, held, len(raw) + len(part), rules.max_nbytes)
                raw += part
        yield raw
    except ClientDisconnect:
        raise HTTPException(499, "the caller has gone") from None
    except TimeoutError:
        raise HTTPException(408, f"the body did not come in {rules.timeout_s:g} s") from None
    finally:
        rules.room.release(caller, held)


async def answer(request: Request, fields: Mapping[str, Any], *, status: int = 200) -> Response:
    """Return a small answer in the first format that the caller accepts."""
    kind = _accepted(request)
    if kind == JSON:
        return json_answer(fields, status)
    return Response(b"".join(_encoded(fields, kind)), status, media_type=kind)


async def stream_answer(
    request: Request, fields: Mapping[str, Any], *, ended: Callable[[bool], None]
) -> Response:
    """Return a large answer in the first format that the caller accepts, piece by piece.

    Args:
        request: To be answered.
        fields: The answer; arrays are tensors.
        ended: Called once, with whether all of it was written.

    Raises:
        HTTPException: 406 when it accepts none.
    """
    try:
        kind = _accepted(request)
        chunks = await asyncio.to_thread(_encoded, fields, kind)
    except BaseException:
        ended(False)
        raise
    return _Streamed(chunks, kind, ended)


def _accepted(request: Request) -> str:
    accept = request.headers.get("accept", "*/*")
    for part in accept.split(","):
        kind = part.partition(";")[0].strip().lower()
        if kind in ("*/*", "application/*", ""):
            return PICKLE
        if kind in (PICKLE, JSON, SAFETENSORS):
            return kind
    raise HTTPException(406, f"answers are {PICKLE}, {JSON} or {SAFETENSORS}, not {accept}")


def _encoded(fields: Mapping[str, Any], kind: str) -> Sequence[bytes | memoryview]:
    if kind == PICKLE:
        return pickle_chunks(fields)
    if kind == JSON:
        return [json.dumps(fields, default=_plain).encode()]
    return [_safetensors(fields)]


class _Streamed(StreamingResponse):
    """Writes chunks, and says whether all of them were."""

    def __init__(
        self, chunks: Sequence[bytes | memoryview], kind: str, ended: Callable[[bool], None]
    ) -> None:
        headers = {"content-length": str(sum(map(len, chunks)))}
        super().__init__(_pieces(chunks), media_type=kind, headers=headers)
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_whole = False

        async def sent(message: Message) -> None:
            nonlocal is_whole
            is_last = message["type"] == "http.response.body" and not message.get("more_body")
            if is_last:
                # A reader that has gone cancels this here: nobody says that a write was in vain.
                await asyncio.sleep(0)
            await send(message)
            is_whole = is_last

        try:
            await super().__call__(scope, receive, sent)
        finally:
            self._ended(is_whole)


async def _pieces(chunks: Sequence[bytes | memoryview]) -> AsyncIterator[bytes]:
    """Yield small chunks together, and large ones in parts."""
    small = bytearray()
    for chunk in chunks:
        if len(chunk) < _WRITE_NBYTES // 16:
            small += chunk
            continue
        yield bytes(small)
        small.clear()
        for start in range(0, len(chunk), _WRITE_NBYTES):
            yield bytes(chunk[start : start + _WRITE_NBYTES])
    yield bytes(small)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(cast("np.ndarray", value))
        dtype, data = Dtype.of(array.dtype), b64encode(array.data).decode()
        return {"dtype": dtype, "shape": list(array.shape), "data": data}
    raise TypeError(f"{type(value).__name__} is not written in bodies")


def _safetensors(fields: Mapping[str, Any]) -> bytes:
    from safetensors.numpy import save  # noqa: PLC0415 - only who asks for it pays

    tensors: dict[str, np.ndarray] = {}

    def rest_of(value: Any, path: str) -> Any:
        """Put arrays, named by their path, into `tensors`; return the rest."""
        if isinstance(value, np.ndarray):
            tensors[path] = np.ascontiguousarray(cast("np.ndarray", value))
            return None
        dot = f"{path}." if path else ""
        if isinstance(value, Mapping):
            items = cast("Mapping[str, Any]", value).items()
            rest = {key: rest_of(each, f"{dot}{key}") for key, each in items}
            return {key: each for key, each in rest.items() if f"{dot}{key}" not in tensors}
        if isinstance(value, list | tuple):
            values = cast("Sequence[Any]", value)
            return [rest_of(each, f"{dot}{index}") for index, each in enumerate(values)]
        return value

    return save(tensors, {"json": json.dumps(rest_of(fields, ""))})


def _is_endpoint(value: str) -> str:
    try:
        return join_address(*_dialled(*split_address(value)))
    except AstraflowError:
        raise ValueError("it is not host:port") from None


def _is_url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or parts.query or parts.fragment or parts.username:
        raise ValueError("it is not http://host:port")
    _dialled(parts.hostname or "", 1 if parts.port is None else parts.port)
    return value


def _dialled(host: str, port: int) -> tuple[str, int]:
    if (
        not port
        or not host
        or not host.isascii()
        or not host.isprintable()
        or set(host) & set(" /@\\")
    ):
        raise ValueError("it names no host and port")
    return host, port


Endpoint = Annotated[str, Field(max_length=300), AfterValidator(_is_endpoint)]

Url = Annotated[str, Field(max_length=300), AfterValidator(_is_url)]

Version = Annotated[int, Field(ge=0, lt=1 << 53)]


class Fields(BaseModel):
    """Of a request; unknown ones are refused, so that a misspelt one is not ignored."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class TrainerReady(Fields):
    """A trainer joins the run."""

    train_batch_size: int | None = Field(default=None, ge=1, description="Sequences per batch.")
    model_id: str | None = Field(default=None, description="Its policy; unset: the only one.")
    sender_endpoint: Endpoint | None = Field(default=None, description="host:port of its weights.")
    recovered_version: Version | None = Field(
        default=None, description="Version of the weights that it comes back with."
    )


class NotifyVersion(Fields):
    """A trainer has new weights."""

    version: Version = Field(description="The trainer's own number, one more than the last.")
    run_eval: bool = Field(
        default=False, description="Whether to wait for the recipe's evaluations of it."
    )
    model_id: str | None = Field(default=None, description="Its policy; unset: the only one.")


class LoadVersion(Fields):
    """A trainer has new weights, which a RaaS is to fetch."""

    version: Version = Field(description="The trainer's own number.")
    sender_endpoint: Endpoint = Field(description="host:port of its weights.")
    model_id: str | None = Field(default=None, description="The policy; unset: the only one.")


class RegisterRaas(Fields):
    """A RaaS that speaks HTTP joins the pool."""

    uid: str = Field(min_length=1, max_length=200, description="Its name in the pool.")
    raas_url: Url = Field(description="Where it is called.")
    gpu_count: int | None = Field(
        default=None, ge=0, lt=1 << 20, description="For the pool's tables."
    )


class DeregisterRaas(Fields):
    """A RaaS leaves the pool."""

    uid: str = Field(min_length=1, max_length=200, description="Its name in the pool.")
    shutdown: bool = Field(default=False, description="Whether to POST /shutdown to it.")


_ERROR: Final = {
    "content": {
        JSON: {
            "schema": {
                "type": "object",
                "properties": {
                    "error": {"type": "string", "description": "What to do about it."},
                    "reason": {"type": "string", "description": "The run's reason, if it is one."},
                },
            }
        }
    }
}

ANSWERS: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "Without Accept a pickled dict, as published.",
        "content": {PICKLE: {}, JSON: {}, SAFETENSORS: {}},
    },
    413: {"description": "The body is too large.", **_ERROR},
    415: {"description": "Pickled bodies are not read here, or the type is unknown.", **_ERROR},
    422: {"description": "A field is wrong.", **_ERROR},
}


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return the description of a body that is read by hand."""
    schema = {"schema": model.model_json_schema()}
    return {"requestBody": {"content": {JSON: schema, PICKLE: schema}}}


_CONNECTIONS = 512
_HOST_CONNECTIONS = 256
_IDLE_S = 75.0


@asynccontextmanager
async def serve_app(
    app: FastAPI,
    *,
    host: str,
    rules: BodyRules,
    port: int = 0,
    token: str = "",
    tls: Tls | None = None,
) -> AsyncGenerator[str]:
    """Serve an app until the end of the block; yield its host:port. A token is shown as Bearer.

    Raises:
        AstraflowError: INVALID_FIELD when it cannot listen there, or cannot read what TLS needs.
    """
    head_s = rules.head_timeout_s
    limits = HttpLimits(
        head_s=head_s,
        idle_s=_IDLE_S,
        connection_count=_CONNECTIONS,
        host_connection_count=_HOST_CONNECTIONS,
        late_answer=_answer("408 Request Timeout", f"no request head came in {head_s:g} s"),
        wrong_answer=lambda why: _answer("400 Bad Request", why),
    )
    guarded: ASGIApp = app
    if token:
        told = {"error": "show the token of this gateway: Authorization: Bearer ..."}
        refused = json_answer(told, 401)
        refused.headers["www-authenticate"] = "Bearer"
        guarded = behind_secret(app, secret=token, shown=bearer_of, refused=refused)
    server = await HttpServer.start(
        guarded, listen=join_address(host, port), limits=limits, tls=tls
    )
    try:
        yield server.address
    finally:
        await server.close()


def _answer(status: str, why: str) -> bytes:
    body = json.dumps({"error": why}).encode()
    head = (
        f"HTTP/1.1 {status}\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
