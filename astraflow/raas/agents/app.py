"""The app: routes, whose request it is, and answers as JSON or as server-sent events."""

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import structlog
from pydantic import BaseModel, ConfigDict, FiniteFloat, ValidationError
from pydantic_core import from_json
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.texts import whole_text
from astraflow.raas.agents.anthropic import MessagesFormat
from astraflow.raas.agents.chats import ChatFormat, TextFormat, prompt_count
from astraflow.raas.agents.completion import Choice, CompletionItem
from astraflow.raas.agents.endpoint import AgentEndpoint
from astraflow.raas.agents.formats import (
    ApiFormat,
    ErrorBody,
    answer_of,
    body_of,
    invalid_body,
)
from astraflow.raas.agents.responses import ResponsesFormat
from astraflow.rpc.auth import is_same_secret
from astraflow.rpc.concurrency import Outbox
from astraflow.rpc.http import bearer_of, disconnected, until_disconnect
from astraflow.workflows.agents.session import AgentSession, describe
from astraflow.workflows.protocol import Score

_STREAM_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
    ],
}


async def stream_events(
    answer: ApiFormat[Any],
    room: ExitStack,
    _scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    """Answer a request in a stream until all is said, something fails, or the client leaves.

    Nothing is sampled before; the room is closed at the end.
    """
    queue: Outbox[CompletionItem] = Outbox()
    leaving = asyncio.ensure_future(disconnected(receive))
    leaving.add_done_callback(lambda _: queue.close(ClientDisconnect()))
    with room:
        try:
            await send(_STREAM_START)
            await send(_body_message(answer.begin(), has_more=True))
            open_count = answer.request.count
            async with aclosing(answer.completion.stream(queue)) as all_items:
                async for items in all_items:
                    written: list[bytes] = []
                    for one in items:
                        if isinstance(one, Choice):
                            open_count -= 1
                            written.append(answer.close(one))
                        else:
                            written.append(answer.show(one))
                    if not open_count:
                        written.append(answer.end())
                    await send(_body_message(b"".join(written), has_more=open_count > 0))
        except AstraflowError as error:
            await send(_body_message(answer.fail(error), has_more=False))
        except ClientDisconnect:
            return
        finally:
            leaving.cancel()


def _body_message(body: bytes, *, has_more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": has_more}


Answer = Callable[[Request], Awaitable[ASGIApp]]

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_CLIENT_CLOSED = 499  # As nginx calls a client that did not wait.

_MAX_WAIT_S = 60.0


class Reward(BaseModel):
    """What an agent reports."""

    model_config = ConfigDict(strict=True, extra="forbid")

    reward: FiniteFloat
    parts: dict[str, FiniteFloat] = {}
    metrics: dict[str, FiniteFloat] = {}


class End(BaseModel):
    """How an agent ends its episode."""

    model_config = ConfigDict(strict=True, extra="forbid")

    failure: str = ""


def make_app(endpoint: AgentEndpoint) -> Starlette:
    """Return the app of an endpoint."""
    handlers = _Routes(endpoint)
    posted: dict[str, tuple[Answer, ErrorBody]] = {
        form.path: (partial(handlers.answer, form), form.error_body)
        for form in (ChatFormat, TextFormat, ResponsesFormat, MessagesFormat)
    }
    posted[f"{MessagesFormat.path}/count_tokens"] = (handlers.counted, MessagesFormat.error_body)
    routes = [
        Route(f"{base}/{path}", _guarded(call, write), methods=["POST"])
        for path, (call, write) in posted.items()
        for base in ("", "/sessions/{session_id}")
    ]
    routes += [
        Route(f"{base}/v1/models", _guarded(handlers.models))
        for base in ("", "/sessions/{session_id}")
    ]
    routes += [
        Route("/sessions", _guarded(handlers.take), methods=["POST"]),
        Route("/sessions/{session_id}", _guarded(handlers.show)),
        Route("/sessions/{session_id}/reward", _guarded(handlers.reward), methods=["POST"]),
        Route("/sessions/{session_id}/end", _guarded(handlers.end), methods=["POST"]),
    ]
    return Starlette(routes=routes, exception_handlers={404: _no_route, 405: _no_route})


def _guarded(call: Answer, write: ErrorBody = body_of) -> Answer:
    """Answer errors in the form of the API."""

    async def answer(request: Request) -> ASGIApp:
        try:
            return await call(request)
        except AstraflowError as error:
            return answer_of(error, write)
        except ValidationError as error:
            return answer_of(invalid_body(error), write)
        except ClientDisconnect:
            return Response(status_code=_CLIENT_CLOSED)
        except Exception as error:  # where no client may see a traceback, or a text of the server's
            log.exception("a request of an agent failed", path=request.url.path)
            broke = AstraflowError(Reason.INTERNAL, f"the node broke: {type(error).__name__}")
            return answer_of(broke, write)

    return answer


@dataclass(frozen=True, slots=True)
class _Routes:
    """Answers requests."""

    endpoint: AgentEndpoint

    async def answer(self, form: type[ApiFormat[Any]], request: Request) -> ASGIApp:
        """Answer a request of an API."""
        session = self._session(request)
        answer = form.of(session, _read(form, await self._body(request)))
        with ExitStack() as room:
            try:
                room.enter_context(self.endpoint.reserve(answer.request.count))
            except AstraflowError as error:
                answer.completion.note_failure(error)
                raise
            if answer.request.stream:
                return partial(stream_events, answer, room.pop_all())
            choices = await until_disconnect(request.receive, answer.completion.choices())
        return JSONResponse(answer.body(choices))

    async def counted(self, request: Request) -> Response:
        """Tell how many tokens a message would be for the policy."""
        session = self._session(request)
        given = _read(MessagesFormat, await self._body(request))
        return JSONResponse({"input_tokens": prompt_count(session, given)})

    async def models(self, request: Request) -> Response:
        """Name the policies."""
        made = {"object": "model", "created": 0, "owned_by": "astraflow"}
        policies = self._session(request).policy_ids
        return JSONResponse({"object": "list", "data": [{"id": each, **made} for each in policies]})

    async def take(self, request: Request) -> Response:
        """Hand out the next episode; 204 when there is none in a while."""
        if not is_same_secret(_key_of(request), self.endpoint.token):
            raise AstraflowError(Reason.TOKEN_INVALID, "the bearer token is not this node's")
        given = request.query_params.get("wait_s", "30")
        try:
            wait_s = float(given)
        except ValueError:
            wait_s = math.nan
        if not 0 <= wait_s < math.inf:
            why = f"wait_s is {given[:40]!r}, no number of seconds from 0"
            raise AstraflowError(Reason.INVALID_FIELD, why, metadata={"field": "wait_s"})
        wait_s = min(wait_s, _MAX_WAIT_S)
        lane = request.query_params.get("lane", "")
        session = await until_disconnect(request.receive, self.endpoint.take(lane, wait_s=wait_s))
        if session is None:
            return Response(status_code=204)
        url = await self.endpoint.url_of(session)
        return JSONResponse({**describe(session), "session_url": url, "base_url": f"{url}/v1"})

    async def show(self, request: Request) -> Response:
        """Tell what an episode is about."""
        return JSONResponse(describe(self._session(request)))

    async def reward(self, request: Request) -> Response:
        """Take a reward."""
        session = self._session(request)
        told = Reward.model_validate(await self._body(request, may_be_empty=True))
        session.report(Score(reward=told.reward, parts=told.parts, metrics=told.metrics))
        return JSONResponse({"reward": told.reward})

    async def end(self, request: Request) -> Response:
        """End an episode."""
        session = self._session(request)
        told = End.model_validate(await self._body(request, may_be_empty=True))
        session.end(told.failure)
        return JSONResponse({"ended": True})

    def _session(self, request: Request) -> AgentSession:
        session_id = request.path_params.get("session_id")
        if session_id is not None:
            return self.endpoint.session(session_id)
        return self.endpoint.session_of_key(_key_of(request))

    async def _body(self, request: Request, *, may_be_empty: bool = False) -> dict[str, Any]:
        """Return a body as an object; `may_be_empty`: none is one without fields.

        Raises:
            AstraflowError: INVALID_FIELD when it is none, MESSAGE_TOO_LARGE, SOURCE_TIMEOUT.
        """
        settings = self.endpoint.settings
        body = bytearray()
        try:
            async with asyncio.timeout(settings.patience_s):
                async for part in request.stream():
                    body += part
                    if len(body) > settings.max_body_nbytes:
                        raise AstraflowError(
                            Reason.MESSAGE_TOO_LARGE,
                            f"the body is larger than {settings.max_body_nbytes} bytes "
                            "(raas.agents.max_body_nbytes)",
                        )
        except TimeoutError:
            raise AstraflowError(
                Reason.SOURCE_TIMEOUT,
                f"the body did not come within {settings.patience_s:g} s; send it again",
            ) from None
        if not body:
            if may_be_empty:
                return {}
            why = "the request has no body; send a JSON object"
            raise AstraflowError(Reason.INVALID_FIELD, why)
        try:
            given = _parsed(body)
        except (ValueError, RecursionError) as error:
            raise AstraflowError(Reason.INVALID_FIELD, f"the body is no JSON: {error}") from error
        if not isinstance(given, dict):
            raise AstraflowError(Reason.INVALID_FIELD, "the body is no object")
        return cast("dict[str, Any]", given)


def _parsed(body: bytearray) -> Any:
    """Read JSON; half of a surrogate pair becomes the replacement character.

    JavaScript writes such halves where it cut the output of a tool within an emoji.

    Raises:
        ValueError: It is no JSON.
        RecursionError: It is nested too deeply.
    """
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError:
        if b"\\u" not in body:
            raise
    text = json.dumps(json.loads(body), ensure_ascii=False)
    return from_json(whole_text(text), allow_inf_nan=False)


def _read(form: type[ApiFormat[Any]], given: dict[str, Any]) -> dict[str, Any]:
    """Return a body as that of the request which it stands for.

    Raises:
        AstraflowError: INVALID_FIELD when it is not what the API wants.
    """
    try:
        return form.read(given)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise AstraflowError(
            Reason.INVALID_FIELD, f"the body is not what /{form.path} takes: {error!r}"
        ) from error


def _key_of(request: Request) -> str:
    return bearer_of(request.headers) or request.headers.get("x-api-key", "")


async def _no_route(request: Request, error: Exception) -> Response:
    del error
    problem = f"{request.method} {request.url.path} is not served here"
    unknown = {"message": problem, "type": "invalid_request_error", "code": "unknown_url"}
    return JSONResponse({"error": {**unknown, "param": None}}, 404)
