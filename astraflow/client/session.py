"""The session of a member: opened, kept alive on a channel of its own, opened again."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import structlog
from grpc.aio import AioRpcError

from astraflow.client.hooks import MemberHooks
from astraflow.client.hub import Hub, is_away, is_cut
from astraflow.client.patience import Patience
from astraflow.client.run_clock import RunClock
from astraflow.core.clock import Clock, SystemClock
from astraflow.core.errors import AstraflowError, Failure, Reason
from astraflow.core.members import (
    Directive,
    DirectiveKind,
    RaasLoad,
    Session,
    SessionResume,
    TrainerLoad,
)
from astraflow.rpc.auth import MetadataPairs, session_metadata
from astraflow.rpc.channel import dial_from_thread
from astraflow.rpc.errors import raised_from
from astraflow.wire.common import (
    decode_directive,
    encode_failure,
    encode_raas_load,
    encode_trainer_load,
)
from astraflow_proto.dataflow.v1 import session_service_pb2 as pb
from astraflow_proto.dataflow.v1.session_service_pb2_grpc import SessionServiceStub

Response = TypeVar("Response")
Event = TypeVar("Event")

# The session is over and can be opened again; a hub that forgot it (restarted without its
# journal) says TOKEN_INVALID.
_REOPENED = frozenset({Reason.SESSION_ENDED, Reason.TOKEN_INVALID})

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class SessionKeeper:
    """Keeps one member in the run, over cuts and restarts of the hub.

    All calls of the member go through `call` and `stay`: they carry the session's token, open
    the session again when it ended, and go on.

    Attributes:
        hub: Where calls go; KeepAlive has a connection of its own.
        directive: What the run asks for.
        transfer_token: Secret that sources of weights compare.
        run_clock: The run's clock, as KeepAlives tell it.
    """

    def __init__(
        self,
        *,
        hub: Hub,
        keep_alive_hub: Hub,
        hooks: MemberHooks,
        incarnation: int = 1,
        clock: Clock | None = None,
    ) -> None:
        """Prepare; nothing is dialled.

        Args:
            hub: For everything but KeepAlive.
            keep_alive_hub: Another connection to the same hub.
            hooks: The member.
            incarnation: Which start of the process this is.
            clock: Tells the time.
        """
        self.hub = hub
        self.directive = Directive(kind=DirectiveKind.CONTINUE)
        self.transfer_token = b""
        self._keep_alive_hub = keep_alive_hub
        self._hooks = hooks
        self._incarnation = incarnation
        self._clock = clock or SystemClock()
        self.run_clock = RunClock(self._clock)
        self._session: Session | None = None
        self._opening = asyncio.Lock()
        self._sessions = SessionServiceStub(hub.channel)
        self._keep_alive = SessionServiceStub(keep_alive_hub.channel).KeepAlive

    @property
    def session(self) -> Session:
        """The session; open it first.

        Raises:
            AstraflowError: NOT_READY when it was never opened.
        """
        if self._session is None:
            raise AstraflowError(Reason.NOT_READY, "the session was not opened yet; join first")
        return self._session

    @property
    def metadata(self) -> MetadataPairs:
        """What every call of the member carries."""
        return session_metadata(self.session.token)

    async def open(self) -> Session:
        """Join the run for the first time.

        Raises:
            AstraflowError: What `join` raises.
        """
        self._take(await self._hooks.join(None))
        return self.session

    async def reopen(self, token: bytes) -> None:
        """Open the session again, unless another caller did since `token` was in use.

        Raises:
            AstraflowError: SESSION_FENCED, and what `join` raises.
        """
        async with self._opening:
            if self.session.token != token:
                return
            log.warning("opening the session again", member_id=self.session.member_id)
            self._take(await self._join_again(token))
            self._hooks.opened(self.session)

    async def _join_again(self, token: bytes) -> Session:
        held = self._hooks.held()
        resume = SessionResume(
            resume_token=token,
            incarnation=self._incarnation,
            held_task_ids=held.task_ids,
            held_batch_ids=held.batch_ids,
        )
        try:
            return await self._hooks.join(resume)
        except AstraflowError as error:
            if error.reason is not Reason.TOKEN_INVALID:
                raise
        # The hub does not know the session: it lost its state. A wrong join token fails again.
        return await self._hooks.join(None)

    def _take(self, session: Session) -> None:
        self._session = session
        self._entrust(session.transfer_token)

    def _entrust(self, transfer_token: bytes) -> None:
        if transfer_token and transfer_token != self.transfer_token:
            self.transfer_token = transfer_token
            self._hooks.entrusted(transfer_token)

    async def call(
        self, method: Callable[..., Awaitable[Response]], request: object, *, timeout_s: float = 10
    ) -> Response:
        """Make an idempotent call as this member.

        Raises:
            AstraflowError: What the hub answered; NOT_READY when it could not be reached.
        """
        patience = self.hub.patience()
        while True:
            token = self.session.token
            try:
                return await self.hub.call(
                    method, request, metadata=session_metadata(token), timeout_s=timeout_s
                )
            except AstraflowError as error:
                if error.reason not in _REOPENED:
                    raise
                # A hub that restarts again and again ends one session after the other.
                await self.reopen(token)
                await patience.pause(error)

    async def stay(
        self, stream: Callable[[Patience], Awaitable[bool]], *, reconciles: bool = False
    ) -> None:
        """Run a stream and open it again whenever it is cut, until it says that it is done.

        Args:
            stream: Makes one call and follows it to its end; calls `renew` whenever the hub
                says something; returns whether nothing more is to come.
            reconciles: Open the session again after a cut: the run compares what it sent with
                what is held here, and sends what was lost on the way.

        Raises:
            AstraflowError: What the hub answered; NOT_READY when it could not be reached.
        """
        patience = self.hub.patience()
        while True:
            token, started_s = self.session.token, self._clock.monotonic()
            try:
                if await stream(patience):
                    return
                _honour_cancellation()
                await patience.pause(self._silent())
            except AioRpcError as error:
                self._forgive(patience, started_s)
                await self._recover(error, token, patience)
            if reconciles:
                await self.reopen(token)

    async def follow(self, open_stream: Callable[[], AsyncIterator[Event]]) -> AsyncIterator[Event]:
        """Yield the events of a stream of answers, over cuts, without end.

        Args:
            open_stream: Opens the call, from where the last one was cut.

        Raises:
            AstraflowError: What the hub answered; NOT_READY when it could not be reached.
        """
        patience = self.hub.patience()
        while True:
            token, started_s = self.session.token, self._clock.monotonic()
            try:
                async for event in open_stream():
                    patience.renew()
                    yield event
                _honour_cancellation()
                await patience.pause(self._silent())
            except AioRpcError as error:
                self._forgive(patience, started_s)
                await self._recover(error, token, patience)

    def _forgive(self, patience: Patience, since_s: float) -> None:
        """Count anew after a stream that was open while a KeepAlive was answered.

        It may have had nothing to say for longer than patience lasts: cuts of it that lie far
        apart are not failures in a row.
        """
        if self.run_clock.was_heard_since(since_s):
            patience.renew()

    async def _recover(self, error: AioRpcError, token: bytes, patience: Patience) -> None:
        """Get ready for the next attempt, or raise when there is none."""
        _honour_cancellation()
        if is_cut(error):
            await patience.pause(self.hub.unreachable(error), is_away=is_away(error))
            return
        answered = raised_from(error)
        if answered.reason not in _REOPENED:
            raise answered from error
        await self.reopen(token)
        await patience.pause(answered)

    def _silent(self) -> AstraflowError:
        return AstraflowError(
            Reason.NOT_READY,
            f"the hub at {self.hub.address} ends every stream at once; look at its log",
            retryable=True,
        )

    async def run(self) -> None:
        """Send KeepAlive until cancelled; the first one at once, for the time that it tells.

        Raises:
            AstraflowError: SESSION_FENCED; RUN_ENDED; NOT_READY when the hub is gone for good.
        """
        patience = self._keep_alive_hub.patience()
        while True:
            await self._beat(patience)
            await asyncio.sleep(self.session.keep_alive_interval.total_seconds())

    async def _beat(self, patience: Patience) -> None:
        session, asked_s = self.session, self._clock.monotonic()
        try:
            answer = await self._keep_alive(
                _keep_alive_request(self._hooks.load()),
                metadata=session_metadata(session.token),
                timeout=session.ttl.total_seconds(),
            )
        except AioRpcError as error:
            await self._recover(error, session.token, patience)
            return
        patience.renew()
        told = answer.server_time.ToDatetime(tzinfo=self._clock.now().tzinfo)
        self.run_clock.hear(told, asked_s=asked_s)
        self._entrust(answer.transfer_token)
        if answer.HasField("directive"):
            self.direct(decode_directive(answer.directive))

    def direct(self, directive: Directive) -> None:
        """Take an order, from whichever stream it came; equal ones count once."""
        if directive != self.directive:
            self.directive = directive
            self._hooks.directed(directive)

    async def report(self, failure: Failure) -> None:
        """Tell the run of what failed beside any rollout.

        Raises:
            AstraflowError: What the hub answered; NOT_READY when it could not be reached.
        """
        request = pb.ReportFailureRequest(failure=encode_failure(failure))
        await self.call(self._sessions.ReportFailure, request)

    def report_from_thread(self, failure: Failure, *, timeout_s: float = 5.0) -> None:
        """Tell the same while the event loop stands still; blocks.

        Raises:
            grpc.RpcError: It was not heard.
        """
        request = pb.ReportFailureRequest(failure=encode_failure(failure))
        with dial_from_thread(self.hub.address, tls=self.hub.tls) as channel:
            call = SessionServiceStub(channel).ReportFailure
            call(request, metadata=self.metadata, timeout=timeout_s)

    async def end(self, message: str) -> None:
        """Leave; what is still held returns to the run. Best effort: silence ends it too."""
        request = pb.EndSessionRequest(message=message)
        try:
            await self._sessions.EndSession(request, metadata=self.metadata, timeout=5)
        except AioRpcError as error:
            log.info("the hub did not hear the good-bye", details=error.details())


def _keep_alive_request(load: RaasLoad | TrainerLoad) -> pb.KeepAliveRequest:
    if isinstance(load, RaasLoad):
        return pb.KeepAliveRequest(raas=encode_raas_load(load))
    return pb.KeepAliveRequest(trainer=encode_trainer_load(load))


def _honour_cancellation() -> None:
    """End a task that was cancelled.

    grpc.aio may answer a cancellation with the end or the status of the call instead of letting it
    through; taken for a cut, it would be lost.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
