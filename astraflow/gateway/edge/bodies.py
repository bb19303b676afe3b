"""Bodies: read by content type, written by what the caller accepts.

Without Accept an answer has the published format, a pickled dict. The others are JSON, with
tensors as {dtype, shape, data} (base64 of raw little-endian bytes), and safetensors, with all that
is no tensor as one JSON text under `json` in the metadata.
"""

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar, cast

import numpy as np
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from astraflow.codec.pickles import pickle_chunks, read_pickle
from astraflow.core.dtype import Dtype
from astraflow.core.errors import AstraflowError
from astraflow.gateway.edge.errors import json_answer
from astraflow.rpc.peers import caller_of
from astraflow.rpc.reading import JSON_NBYTES, ReadBudget, read, read_json

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
        if raw:
            _require_readable(kind, len(raw), rules)
        quick_nbytes = _QUICK_JSON_NBYTES if kind == JSON else _QUICK_PICKLE_NBYTES
        return await read(partial(_parsed, kind, model), raw, quick_nbytes=quick_nbytes)


def _require_readable(kind: str, nbytes: int, rules: BodyRules) -> None:
    if kind not in (JSON, PICKLE):
        raise HTTPException(415, f"a body is {JSON} or {PICKLE}, not {kind}")
    if kind == JSON and nbytes > JSON_NBYTES:
        raise HTTPException(413, f"a body of JSON has at most {JSON_NBYTES} bytes here")
    if kind == PICKLE and not rules.reads_pickles:
        why = "pickled bodies are read only where the gateway was started with --legacy-pickle"
        raise HTTPException(415, f"{why} (http.legacy_pickle in a recipe); or send {JSON}")


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
    """Read the bytes of a body; they take room until the end of the block.

    Raises:
        HTTPException: 413, 408, 499.
        AstraflowError: OVERLOADED.
    """
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
    """Return a small answer in the first format that the caller accepts.

    Raises:
        HTTPException: 406 when it accepts none.
    """
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
