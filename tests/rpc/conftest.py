"""A service of all four kinds of calls, made by hand so that no contract is needed."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import grpc
import pytest

from astraflow.rpc.channel import dial
from astraflow.rpc.server import Servicer, start_server

KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


def add_echo(methods: Any, server: Any) -> None:
    """Add test.Echo; a method per kind, bytes in and out."""
    handlers = {
        kind: getattr(grpc, f"{kind}_rpc_method_handler")(getattr(methods, kind)) for kind in KINDS
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", handlers),))
    server.add_registered_method_handlers("test.Echo", handlers)


Call = Callable[..., Any]
Serve = Callable[..., AbstractAsyncContextManager[Call]]


@pytest.fixture
def serve() -> Serve:
    """Serve an object as test.Echo; gives a function that calls one of its methods by kind."""

    @asynccontextmanager
    async def serving(methods: object, **options: Any) -> AsyncIterator[Call]:
        servicer = Servicer(add=add_echo, methods=methods)
        async with await start_server([servicer], **options) as server:
            channel = dial(server.address)
            async with channel:

                async def call(kind: str, request: bytes = b"x", **more: Any) -> list[bytes]:
                    method = getattr(channel, kind)(f"/test.Echo/{kind}")
                    given = iter([request]) if kind.startswith("stream") else request
                    answer = method(given, **more)
                    try:
                        if kind.endswith("stream"):
                            return [each async for each in answer]
                        return [await answer]
                    finally:
                        # grpc.aio loses a cancellation that comes between request and answer.
                        answer.cancel()

                call.address = server.address
                yield call

    return serving
