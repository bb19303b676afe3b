"""Listening: an app on a socket of its own, on the running event loop."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.types import ASGIApp

from astraflow.gateway.edge.bodies import BodyRules
from astraflow.gateway.edge.errors import json_answer
from astraflow.rpc.address import join_address
from astraflow.rpc.http import HttpLimits, HttpServer, SecretGate, bearer_of
from astraflow.rpc.tls import Tls

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
    """Serve an app until the end of the block; yield its host:port.

    Args:
        app: What is served.
        host: To listen on.
        rules: Of requests.
        port: 0 takes a free one.
        token: That every request shows as `Authorization: Bearer`; empty: none has to.
        tls: Shown to callers; None: plain text.

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
    server = await HttpServer.start(
        _guarded(app, token) if token else app,
        listen=join_address(host, port),
        limits=limits,
        tls=tls,
    )
    try:
        yield server.address
    finally:
        await server.close()


def _guarded(app: FastAPI, token: str) -> ASGIApp:
    told = {"error": "show the token of this gateway: Authorization: Bearer ..."}
    refused = json_answer(told, 401)
    refused.headers["www-authenticate"] = "Bearer"
    return SecretGate(app, secret=token, shown=bearer_of, refused=refused)


def _answer(status: str, why: str) -> bytes:
    body = json.dumps({"error": why}).encode()
    head = (
        f"HTTP/1.1 {status}\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
