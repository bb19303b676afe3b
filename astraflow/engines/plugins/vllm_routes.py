"""A route for vLLM's API server: the whole of a change in one call.

vLLM's own routes would be five calls, each with its answer, of which the one that pauses sleeps
for 20 ms. The calls below are those that the routes make, between the two processes of the server.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

PATH = "/astraflow/change"


class UpdateRoute:
    """Answers `POST /astraflow/change`; all else goes to vLLM.

    It takes `{"path": ..., "version": "7", "forget_running": false}` and answers
    `{"reports": [{"version": 7, "nbytes": 4096, "apply_s": 0.001}]}`, one of each worker. After an
    error, status 500 and `{"error": ...}`, the server stays paused: its weights are of no version.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            await self._app(scope, receive, send)
            return
        answer = await _answer(Request(scope, receive))
        await answer(scope, receive, send)


async def _answer(request: Request) -> JSONResponse:
    try:
        reports = await _change(request.app.state.engine_client, **await request.json())
    except Exception as error:  # noqa: BLE001  told to who asks
        return JSONResponse({"error": f"{type(error).__name__}: {error}"}, status_code=500)
    return JSONResponse({"reports": reports})


async def _change(
    engine: Any, *, path: str, version: str, forget_running: bool
) -> list[dict[str, Any]]:
    """Write between two steps, and go on.

    No step is begun or under way from the answer of the first call to the last call. So all tokens
    of the steps before are told to be of the version before, and all later ones of this one.
    """
    await engine.engine_core.pause_scheduler_async("keep", False)
    reports = await engine.collective_rpc("astraflow_apply", args=(path,))
    if forget_running:
        await engine.reset_prefix_cache(reset_running_requests=True)
    await engine.update_weight_version(version)
    await engine.resume_generation()
    return reports
