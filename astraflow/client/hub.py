"""The hub as its callers see it: an address that may not answer for a while."""

import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Self, TypeVar

import grpc
from grpc.aio import AioRpcError

from astraflow.core.errors import AstraflowError, Reason
from astraflow.rpc.auth import MetadataPairs
from astraflow.rpc.channel import dial, proxy_of
from astraflow.rpc.concurrency import Liveness, Retry
from astraflow.rpc.errors import is_answer, raised_from
from astraflow.rpc.tls import Tls

Request = TypeVar("Request")
Response = TypeVar("Response")

# What a cut, a restart of the hub or a proxy between the two looks like. ABORTED ends a stream
# that another one of the same member replaced.
_CUT = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    }
)
_AWAY = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})
# What a join may find that was heard before.
_TAKEN = frozenset({Reason.NAME_TAKEN, Reason.POLICY_TAKEN})


class HubChannel:
    """A channel to the hub that outlasts cuts and restarts.

    Calls raise what the hub answers, and NOT_READY when it could not be reached.

    Attributes:
        address: host:port.
        tls: None: plain text.
        patience_s: How long it is tried again while nothing is heard from it.
        liveness: When it was last heard.
        channel: For stubs.
    """

    def __init__(
        self,
        address: str,
        *,
        tls: Tls | None = None,
        patience_s: float = 30.0,
        liveness: Liveness | None = None,
    ) -> None:
        """Dial nothing yet. `liveness` is of the same hub on another channel."""
        self.address = address
        self.tls = tls
        self.patience_s = patience_s
        self.liveness = liveness or Liveness()
        self.channel = dial(address, tls=tls)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close(None)

    def retry(self) -> Retry:
        """Return what bounds the repeats of a call to it."""
        return Retry(self.patience_s, liveness=self.liveness)

    async def call(
        self,
        method: Callable[..., Awaitable[Response]],
        request: object,
        *,
        metadata: MetadataPairs,
        timeout_s: float = 10.0,
    ) -> Response:
        """Make one call and repeat it while the hub cannot be reached; it must be idempotent.

        A join may have been heard and its answer lost: then the place is taken by the session that
        came of it, which ends soon, because nobody keeps it alive. It is repeated meanwhile.

        Raises:
            AstraflowError: What the hub answered; NOT_READY when it could not be reached.
        """
        retry: Retry | None = None
        was_cut = False
        while True:
            try:
                answer = await method(request, metadata=metadata, timeout=timeout_s)
            except AioRpcError as error:
                if is_cut(error):
                    was_cut = True
                elif not was_cut or raised_from(error).reason not in _TAKEN:
                    raise raised_from(error) from error
                retry = retry or self.retry()
                await retry.pause(self.unreachable(error), is_away=is_away(error))
            else:
                self.liveness.heard_s = time.monotonic()
                return answer

    async def watch(
        self,
        method: Callable[..., AsyncIterable[Response]],
        request: object,
        *,
        metadata: MetadataPairs,
    ) -> AsyncIterator[Response]:
        """Yield what a stream sends until it ends with OK; a cut one is opened again."""
        retry = self.retry()
        while True:
            try:
                async for answer in method(request, metadata=metadata):
                    retry.reset()
                    yield answer
            except AioRpcError as error:
                if not is_cut(error):
                    raise raised_from(error) from error
                await retry.pause(self.unreachable(error), is_away=is_away(error))
            else:
                return

    def unreachable(self, error: AioRpcError) -> AstraflowError:
        """Say that the hub could not be reached, and what to check."""
        if is_answer(error):
            return raised_from(error)
        proxy = proxy_of(self.address)
        through = f", that the proxy of {proxy} reaches it or no_proxy names its host"
        return AstraflowError(
            Reason.NOT_READY,
            f"nothing was heard from the hub at {self.address} for {self.patience_s:g} s, which is"
            f" hub.patience_s ({error.details()}); check that it runs and stays up (its log says"
            " why it does not), that host and port are right, that this machine can dial it"
            f"{through if proxy else ''}, and that both sides use TLS or neither does",
            retryable=True,
        )


@asynccontextmanager
async def dial_twice(
    address: str, *, tls: Tls | None, patience_s: float
) -> AsyncGenerator[tuple[HubChannel, HubChannel]]:
    """Return a hub for calls, and one for KeepAlive, which then waits behind nothing.

    What one of them hears the other counts as heard.
    """
    async with (
        HubChannel(address, tls=tls, patience_s=patience_s) as hub,
        HubChannel(
            address, tls=tls, patience_s=patience_s, liveness=hub.liveness
        ) as keep_alive_hub,
    ):
        yield hub, keep_alive_hub


def is_cut(error: AioRpcError) -> bool:
    """Whether the same call may go well on the next connection; an answer only if NOT_READY."""
    is_foreign = not is_answer(error)
    return raised_from(error).reason is Reason.NOT_READY or (is_foreign and error.code() in _CUT)


def is_away(error: AioRpcError) -> bool:
    """Whether nobody was there to answer."""
    return error.code() in _AWAY and not is_answer(error)
