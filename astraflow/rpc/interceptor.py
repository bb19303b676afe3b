"""The one place where errors of calls become statuses."""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final, TypeAlias, cast

import grpc
import grpc.aio
import structlog

from astraflow.core.errors import AstraflowError, Reason
from astraflow.rpc.errors import status_of

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

# By (request is a stream, response is a stream).
_KINDS: Final[dict[tuple[bool, bool], str]] = {
    (False, False): "unary_unary",
    (False, True): "unary_stream",
    (True, False): "stream_unary",
    (True, True): "stream_stream",
}

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class ErrorInterceptor(
    grpc.aio.ServerInterceptor  # pyright: ignore[reportMissingTypeArgument] - generic in its stubs only
):
    """Turns what a servicer raises into a status.

    AstraflowError: its code, text, ErrorInfo and, when retryable, RetryInfo. Any other
    exception: INTERNAL, logged with its trace. Cancellation and `context.abort` pass.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the method that is called."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        kind = _KINDS[bool(handler.request_streaming), bool(handler.response_streaming)]
        return getattr(grpc, f"{kind}_rpc_method_handler")(
            _guarded(getattr(handler, kind), str(handler_call_details.method)),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def _guarded(behaviour: Callable[..., Any], method: str) -> Callable[..., Any]:
    """Return the method with its errors answered; what is not async stays as it is."""
    if inspect.isasyncgenfunction(behaviour):
        return _guarded_generator(behaviour, method)
    if inspect.iscoroutinefunction(behaviour):
        return _guarded_coroutine(behaviour, method)
    return behaviour


def _guarded_coroutine(behaviour: Callable[..., Any], method: str) -> Callable[..., Any]:
    async def call(request: Any, context: _Context) -> Any:
        try:
            return await behaviour(request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 - the interceptor answers every error
            await _abort(error, context, method)

    return call


def _guarded_generator(behaviour: Callable[..., Any], method: str) -> Callable[..., Any]:
    async def call(request: Any, context: _Context) -> AsyncIterator[Any]:
        try:
            async with aclosing(behaviour(request, context)) as responses:
                async for response in responses:
                    yield response
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 - the interceptor answers every error
            await _abort(error, context, method)

    return call


async def _abort(error: Exception, context: _Context, method: str) -> None:
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
