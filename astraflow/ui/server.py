"""The server of the page: the files of the page, and JSON of the runs, for this machine alone.

Whoever opens the page shows the key of its address once, and a cookie from then on: other users of
the machine, and pages of others in the same browser, learn nothing. A request that names another
host is refused, which is how a page of another site would reach it (DNS rebinding).
"""

import asyncio
import secrets
import webbrowser
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import structlog
from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from astraflow.config.run_dir import RunDir
from astraflow.core.errors import AstraflowError, Reason
from astraflow.launch.runs import differences
from astraflow.rpc.auth import is_same_secret
from astraflow.rpc.concurrency import interruption, switch_threads_soon
from astraflow.rpc.http import HttpServer
from astraflow.ui.shown_run import ShownRun

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

WEB: Final = Path(__file__).parent / "web"

_COOKIE: Final = "astraflow-key"
_TYPES: Final = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".LICENSE": "text/plain",
}
_LOOK_S: Final = 1.0
_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


@asynccontextmanager
async def serve_page(runs: Sequence[ShownRun], *, port: int = 0) -> AsyncGenerator[str]:
    """Serve runs on this machine until the end of the block; yield the address with its key.

    Raises:
        AstraflowError: INVALID_FIELD when the port is not free.
    """
    key = secrets.token_urlsafe(16)
    shown = {run.key: run for run in runs}
    server = await HttpServer.start(_Guard(_app(shown), key), listen=f"127.0.0.1:{port}")
    indexing = asyncio.create_task(_index(shown))
    try:
        yield f"http://{server.address}/?key={key}"
    finally:
        indexing.cancel()
        with suppress(asyncio.CancelledError):
            await indexing
        await server.close()


async def serve_until_told(runs: Sequence[ShownRun], *, port: int, opens: bool) -> None:
    """Serve until Ctrl-C or SIGTERM; say where, and open a browser there."""
    # Rollouts are read on a thread.
    switch_threads_soon()
    stopped = interruption()
    async with serve_page(runs, port=port) as url:
        names = ", ".join(run.key for run in runs)
        print(f"{names}: {url}  (Ctrl-C ends it)", flush=True)  # noqa: T201 - the command's output
        if opens:
            await asyncio.to_thread(webbrowser.open, url)
        await stopped.wait()


async def _index(runs: dict[str, ShownRun]) -> None:
    """Read what is new in the folders of the runs, for ever; a run may take another's place."""
    readable = list(runs)
    while True:
        for key in tuple(readable):
            try:
                if await asyncio.to_thread(runs[key].is_replaced):
                    runs[key] = ShownRun(key, runs[key].run_dir)
                await asyncio.to_thread(runs[key].index)
                await runs[key].cut()
            except Exception:
                readable.remove(key)
                log.exception("files of a run cannot be read; its page stays as it is", run=key)
        await asyncio.sleep(_LOOK_S)


class _Guard:
    """Lets in who shows the key, under a name of this machine; says what a browser may do."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message["headers"] = [*message["headers"], *more]
            await send(message)

        await self._answer(Request(scope))(scope, receive, send_guarded)

    def _answer(self, request: Request) -> ASGIApp:
        named = request.headers.get("host", "")
        if (named.rpartition(":")[0] or named) not in ("127.0.0.1", "localhost"):
            return PlainTextResponse("this page is served to this machine alone", 403)
        shown = request.query_params.get("key")
        if shown is not None and is_same_secret(shown, self._key):
            answer = RedirectResponse("/")
            answer.set_cookie(self._cookie(request), shown, httponly=True, samesite="strict")
            return answer
        if is_same_secret(request.cookies.get(self._cookie(request), ""), self._key):
            return self._app
        return PlainTextResponse(
            "open the address that `astraflow ui` has printed: its key is missing here", 403
        )

    @staticmethod
    def _cookie(request: Request) -> str:
        # A browser keeps cookies by host alone: two pages at once would take each other's.
        return f"{_COOKIE}-{request.url.port}"


def _app(runs: Mapping[str, ShownRun]) -> ASGIApp:
    def asked_for(request: Request) -> ShownRun:
        key = request.path_params.pop("run")
        if key not in runs:
            raise HTTPException(404, f"there is no run {key} here")
        return runs[key]

    def route(path: str, make: Callable[[ShownRun, Request], Any]) -> Route:
        async def answer(request: Request) -> Response:
            return _json(await asyncio.to_thread(make, asked_for(request), request))

        return Route(f"/api/runs/{{run}}{path}", answer)

    async def all_runs(_: Request) -> Response:
        return _json(await asyncio.to_thread(overview, [*runs.values()]))

    async def status(request: Request) -> Response:
        return _json(await asked_for(request).status())

    return Starlette(
        routes=[
            Route("/api/runs", all_runs),
            Route("/api/runs/{run}/status", status),
            route("/evals", lambda run, _: run.evals()),
            route("/timeline", lambda run, _: run.timeline()),
            route("/curves/{metric:path}", lambda run, asked: run.curves(**asked.path_params)),
            route("/steps/{policy}/{step:int}", lambda run, asked: run.step(**asked.path_params)),
            route("/rollouts", lambda run, asked: run.find_rollouts(asked.query_params)),
            route("/rollouts/{rollout_id:path}", lambda run, a: run.rollout(**a.path_params)),
            *_files(),
        ],
        exception_handlers={AstraflowError: _refuse, HTTPException: _refuse},
    )


def _files() -> Iterator[Route]:
    """Yield the files of the page, from memory: a paint waits for no disk and for no thread."""
    for path in WEB.rglob("*.*"):
        content, kind = path.read_bytes(), _TYPES[path.suffix]

        async def answer(_: Request, content: bytes = content, kind: str = kind) -> Response:
            return Response(content, media_type=kind)

        name = path.relative_to(WEB).as_posix()
        yield Route("/" if name == "index.html" else f"/{name}", answer)


def overview(runs: Sequence[ShownRun]) -> Mapping[str, Any]:
    """Return what is known of every run whose folder is there, and in what their recipes differ.

    Raises:
        AstraflowError: NOT_READY when there is none.
    """
    there = [run for run in runs if run.run_dir.recipe.exists()]
    if not there:
        raise AstraflowError(Reason.NOT_READY, "the folders of these runs are gone")
    heads = [run.head() for run in there]
    changed = differences([run.run_dir for run in there]) if len(there) > 1 else {}
    return {"runs": heads, "differences": changed}


def _json(content: Any, status: int = 200) -> Response:
    # Browsers read no NaN.
    text = to_json(content, inf_nan_mode="null")
    return Response(text, status, media_type="application/json")


async def _refuse(_: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return _json({"error": error.detail}, error.status_code)
    return _json({"error": str(error)}, 404)


def shown_runs(folders: Sequence[Path]) -> list[ShownRun]:
    """Return the runs of folders under names that differ.

    Raises:
        AstraflowError: NOT_READY for what is no folder of a run.
    """
    shown: dict[str, ShownRun] = {}
    for folder in folders:
        name = key = folder.resolve().name
        number = 2
        while key in shown:
            key, number = f"{name}-{number}", number + 1
        shown[key] = ShownRun(key, RunDir(folder))
        shown[key].head()
    return list(shown.values())
