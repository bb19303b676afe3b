"""Servers: standard health and reflection, errors as statuses, a port that is surely ours."""

import inspect
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, Self, TypeVar, cast

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from astraflow.core.errors import AstraflowError, Reason
from astraflow.rpc.address import advertised, split_address
from astraflow.rpc.auth import Context
from astraflow.rpc.channel import SERVER_OPTIONS
from astraflow.rpc.errors import status_of, unimplemented
from astraflow.rpc.tls import Tls, server_credentials

_health = cast("Any", health)


log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

Behaviour = TypeVar("Behaviour", bound=Callable[..., Any])

_Read = Callable[[Any, Context], Any]

# Of a request that is read before its caller is known; joining takes a few hundred bytes.
_STRANGERS_NBYTES: Final = 64 << 10

# Of any other. The largest ones list what a member holds, or the patches of a version: some
# thousands, of a hundred bytes each.
_MOST_NBYTES: Final = 2 << 20

# By (request is a stream, response is a stream).
_KINDS: Final[dict[tuple[bool, bool], str]] = {
    (False, False): "unary_unary",
    (False, True): "unary_stream",
    (True, False): "stream_unary",
    (True, True): "stream_stream",
}


class ErrorInterceptor(
    grpc.aio.ServerInterceptor  # pyright: ignore[reportMissingTypeArgument] - generic in its stubs only
):
    """Turns what a servicer raises into a status.

    AstraflowError: its code, text, ErrorInfo and, when retryable, RetryInfo. Any other
    exception: INTERNAL, logged with its trace. Cancellation and `context.abort` pass.

    A request is made of its bytes here, and a large one only for who is known: made, it may take a
    hundred times the memory, and seconds of the event loop.
    """

    def __init__(self, knows: Callable[[Context], bool]) -> None:
        self._knows = knows
        self._wrapped: dict[str, Any] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the method that is called."""
        method = str(handler_call_details.method)
        if method in self._wrapped:
            return self._wrapped[method]
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        kind = _KINDS[bool(handler.request_streaming), bool(handler.response_streaming)]
        behaviour, deserialize = getattr(handler, kind), handler.request_deserializer
        if getattr(behaviour, "takes_bytes", False):
            deserialize = None
        read: _Read = _as_it_came
        if deserialize is not None and _is_async(behaviour):
            reading = self._read_each if handler.request_streaming else self._read
            read, deserialize = partial(reading, deserialize), None
        self._wrapped[method] = getattr(grpc, f"{kind}_rpc_method_handler")(
            _guarded(behaviour, method, read),
            request_deserializer=deserialize,
            response_serializer=_serializer(handler.response_serializer),
        )
        return self._wrapped[method]

    def _read(self, deserialize: Callable[[bytes], Any], request: bytes, context: Context) -> Any:
        if len(request) > _STRANGERS_NBYTES and not self._knows(context):
            raise AstraflowError(
                Reason.TOKEN_INVALID,
                f"a request of {len(request)} bytes needs a secret of the run that is served here",
            )
        if len(request) > _MOST_NBYTES:
            raise AstraflowError(
                Reason.MESSAGE_TOO_LARGE,
                f"a request of this call has at most {_MOST_NBYTES} bytes, not {len(request)}",
            )
        try:
            return deserialize(request)
        except DecodeError as error:
            raise AstraflowError(
                Reason.INVALID_FIELD, f"the request is no message of this call: {error}"
            ) from None

    async def _read_each(
        self, deserialize: Callable[[bytes], Any], requests: AsyncIterator[bytes], context: Context
    ) -> AsyncIterator[Any]:
        async for request in requests:
            yield self._read(deserialize, request, context)


def _as_it_came(request: Any, _: Context) -> Any:
    return request


def takes_bytes(behaviour: Behaviour) -> Behaviour:
    """Have a method get its requests serialized, as they came; it reads them itself."""
    cast("Any", behaviour).takes_bytes = True
    return behaviour


def _serializer(serialize: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """Have methods answer with bytes, too: a message that is serialized."""
    return lambda message: message if isinstance(message, bytes) else serialize(message)


def _is_async(behaviour: Callable[..., Any]) -> bool:
    return inspect.isasyncgenfunction(behaviour) or inspect.iscoroutinefunction(behaviour)


def _guarded(behaviour: Callable[..., Any], method: str, read: _Read) -> Callable[..., Any]:
    """Return the method with its errors answered; what is not async stays as it is."""
    if inspect.isasyncgenfunction(behaviour):
        return _guarded_generator(behaviour, method, read)
    return _guarded_coroutine(behaviour, method, read) if _is_async(behaviour) else behaviour


def _guarded_coroutine(
    behaviour: Callable[..., Any], method: str, read: _Read
) -> Callable[..., Any]:
    async def call(request: Any, context: Context) -> Any:
        try:
            return await behaviour(read(request, context), context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 - the interceptor answers every error
            await _abort(error, context, method)

    return call


def _guarded_generator(
    behaviour: Callable[..., Any], method: str, read: _Read
) -> Callable[..., Any]:
    async def call(request: Any, context: Context) -> AsyncIterator[Any]:
        try:
            async with aclosing(behaviour(read(request, context), context)) as responses:
                async for response in responses:
                    yield response
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 - the interceptor answers every error
            await _abort(error, context, method)

    return call


async def _abort(error: Exception, context: Context, method: str) -> None:
    known = _astraflow_error(error)
    if known is None:
        if isinstance(error, grpc.aio.BaseError) and (context.cancelled() or context.done()):
            return  # The caller is gone, so that a write failed; nobody is left to answer.
        log.exception("a call failed through a defect", method=method, exc_info=error)
        known = AstraflowError(
            Reason.INTERNAL,
            f"{method} failed with {type(error).__name__}: {error};"
            " the log of the answering process has the trace",
        )
    code, text, trailing = status_of(known)
    await context.abort(code, text, trailing)


def _astraflow_error(error: Exception) -> AstraflowError | None:
    """Return the error itself, or the first of a group that holds nothing else."""
    if isinstance(error, AstraflowError):
        return error
    if isinstance(error, ExceptionGroup):
        group = cast("ExceptionGroup[Exception]", error)
        found = [_astraflow_error(each) for each in group.exceptions]
        return found[0] if None not in found else None
    return None


# Its stubs leave the types of handlers and interceptors open.
_make = cast("Callable[..., grpc.aio.Server]", grpc.aio.server)  # pyright: ignore[reportUnknownMemberType]

_WORD_START: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Servicer:
    """One service of a server.

    Attributes:
        methods: Object with the methods of the service. Methods that it lacks answer
            UNIMPLEMENTED with their name as the capability, such as `save_run`.
    """

    add: Callable[[Any, Any], None]
    methods: object


class RunningServer:
    """A server that answers.

    Attributes:
        address: host:port as others dial it.
        port: That it listens on.
    """

    def __init__(
        self, server: grpc.aio.Server, *, address: str, port: int, health: Any, names: Sequence[str]
    ) -> None:
        self.address = address
        self.port = port
        self._server = server
        self._health = health
        self._names = ("", *names)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def set_serving(self, is_serving: bool) -> None:
        """Say to health checks, of the server and each service, whether calls are welcome."""
        status = health_pb2.HealthCheckResponse
        for name in self._names:
            await self._health.set(name, status.SERVING if is_serving else status.NOT_SERVING)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Take no new calls, let running ones end, cut them off after the grace. Idempotent."""
        await self.set_serving(False)
        await self._server.stop(grace_s)

    async def wait_stopped(self) -> None:
        """Return once somebody has stopped it."""
        await self._server.wait_for_termination()


async def start_server(
    servicers: Sequence[Servicer],
    *,
    listen: str = "127.0.0.1:0",
    advertise: str | None = None,
    tls: Tls | None = None,
    knows: Callable[[Context], bool] = lambda _: True,
) -> RunningServer:
    """Start to serve.

    Args:
        servicers: What is served, beside health and reflection.
        listen: host:port; port 0 takes a free one.
        advertise: How others dial it; see `rpc.address.advertised`.
        tls: None or all unset: plain text.
        knows: Whether a caller shows a secret; only then a request of his above 64 KiB is read.

    Raises:
        AstraflowError: INVALID_FIELD when it cannot listen there, for an advertised name that
            does not exist, or TLS files that cannot be read.
    """
    host, _ = split_address(listen, "listen")
    server = _make(interceptors=[ErrorInterceptor(knows)], options=SERVER_OPTIONS)
    names = [_add(server, servicer) for servicer in servicers]
    health = _health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    described = (*names, _health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(described, server)
    bound = _bind(server, listen, tls)
    async with AsyncExitStack() as undo:
        undo.push_async_callback(server.stop, 0)
        address = advertised(host, bound, advertise)
        await server.start()
        undo.pop_all()
    running = RunningServer(server, address=address, port=bound, health=health, names=names)
    await running.set_serving(True)
    return running


def _bind(server: grpc.aio.Server, listen: str, tls: Tls | None) -> int:
    try:
        if tls is None or tls.is_plain:
            return server.add_insecure_port(listen)
        return server.add_secure_port(listen, server_credentials(tls))
    except RuntimeError as error:
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"cannot listen on {listen}: {_why_not(*split_address(listen))};"
            " choose another port, or 0 for a free one",
            metadata={"field": "listen"},
        ) from error


def _why_not(host: str, port: int) -> str:
    """Say in the system's words why an address cannot be bound."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(place)
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return "the address cannot be bound"


class _Complete:
    """A servicer's methods, with an answer for those that it lacks."""

    def __init__(self, methods: object) -> None:
        self._methods = methods

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._methods, name, None)
        return _missing(name) if found is None else found


def _missing(method: str) -> Callable[[Any, Any], Any]:
    capability = _WORD_START.sub("_", method).lower()

    @takes_bytes
    async def refuse(request: object, context: object) -> None:
        del request, context
        raise unimplemented(capability)

    return refuse


def _add(server: grpc.aio.Server, servicer: Servicer) -> str:
    """Add a service and return its full name."""
    names: list[str] = []

    def note(name: str, _: object) -> None:
        # grpc.aio looks methods up in the generic handlers.
        names.append(name)

    naming = SimpleNamespace(
        add_generic_rpc_handlers=cast("Any", server).add_generic_rpc_handlers,
        add_registered_method_handlers=note,
    )
    servicer.add(_Complete(servicer.methods), naming)
    return names[0]
