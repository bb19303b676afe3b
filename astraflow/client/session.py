"""The session of a member: opened, kept alive on a channel of its own, opened again."""

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeVar

import structlog
from grpc.aio import AioRpcError, UnaryStreamCall

from astraflow.client.hub import HubChannel, is_away, is_cut
from astraflow.core.clock import Clock, SystemClock
from astraflow.core.errors import AstraflowError, Failure, Reason
from astraflow.core.ids import BatchId, TaskId
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
from astraflow.rpc.concurrency import Retry
from astraflow.rpc.errors import raised_from
from astraflow.wire.common import (
    decode_directive,
    encode_failure,
    encode_raas_load,
    encode_trainer_load,
)
from astraflow.wire.fields import TABLES, decode_time
from astraflow_proto.common.v1 import session_pb2
from astraflow_proto.dataflow.v1 import session_service_pb2 as pb
from astraflow_proto.dataflow.v1.session_service_pb2_grpc import SessionServiceStub

_ROUND_TRIPS = 8


class RunClock:
    """Tells the time by the run's clock; this machine's own may be hours off."""

    def __init__(self, clock: Clock) -> None:
        """Know nothing yet; `clock` measures what passes since the run was heard."""
        self._clock = clock
        self._told: datetime | None = None
        self._heard_s = -math.inf
        self._round_trips = deque[float](maxlen=_ROUND_TRIPS)

    @property
    def now(self) -> datetime | None:
        """The time; None before it was told."""
        if self._told is None:
            return None
        return self._told + timedelta(seconds=self._clock.monotonic() - self._heard_s)

    @property
    def round_trip_s(self) -> float:
        """Seconds there and back, the shortest of the last calls; 0: none was answered."""
        return min(self._round_trips, default=0.0)

    def update(self, told: datetime, *, asked_s: float) -> None:
        """Take what an answer says the time is, asked for at `asked_s` by the monotonic clock."""
        self._told, self._heard_s = told, self._clock.monotonic()
        self._round_trips.append(self._heard_s - asked_s)

    def has_answer_since(self, time_s: float) -> bool:
        """Whether an answer came after `time_s` by the monotonic clock."""
        return self._heard_s > time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What the process still works on; named when the session is opened again."""

    task_ids: tuple[TaskId, ...] = ()
    batch_ids: tuple[BatchId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberHooks:
    """What a session asks of the member that it belongs to; called on the event loop.

    Attributes:
        load: How busy the member is.
        held: What it works on.
        opened: The session was opened again: what it does not list is no longer the member's.
        directed: The run asks for something else than before.
        on_transfer_token: The transfer token is another one.
    """

    load: Callable[[], RaasLoad | TrainerLoad]
    held: Callable[[], Held] = Held
    opened: Callable[[Session], None] = lambda _: None
    directed: Callable[[Directive], None] = lambda _: None
    on_transfer_token: Callable[[bytes], None] = lambda _: None


Response = TypeVar("Response")

Event = TypeVar("Event")


# The session is over and can be opened again; a hub that forgot it (restarted without its
# journal) says TOKEN_INVALID.
_REOPENED = frozenset({Reason.SESSION_ENDED, Reason.TOKEN_INVALID})

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class SessionCalls:
    """Calls with the token of a session that somebody else opens again, such as rank 0.

    Attributes:
        hub: Where calls go.
        token: Of the session, the newest.
    """

    def __init__(self, hub: HubChannel, token: bytes) -> None:
        self.hub = hub
        self.token = token
        self._clock = SystemClock()

    @property
    def metadata(self) -> MetadataPairs:
        """What every call carries."""
        return session_metadata(self.token)

    def take_directive(self, message: session_pb2.Directive) -> None:
        """Take an order, from whichever stream it came; one of a later release is passed over."""
        if message.kind and message.kind not in TABLES[DirectiveKind].members:
            log.warning("unknown directive; is the hub newer than this?", kind=message.kind)
            return
        self.direct(decode_directive(message))

    def direct(self, directive: Directive) -> None:
        """Leave an order to who opened the session; it comes there as well."""

    async def reopen(self, token: bytes) -> None:
        """Leave it to who opened the session, who then gives the new token."""

    async def follow(
        self, open_stream: Callable[[], UnaryStreamCall[Any, Event]]
    ) -> AsyncGenerator[Event]:
        """Yield the events of a stream of answers, over cuts, without end."""
        retry = self.hub.retry()
        while True:
            token, started_s = self.token, self._clock.monotonic()
            stream = open_stream()
            try:
                async for event in stream:
                    retry.reset()
                    yield event
                _honour_cancellation()
                await retry.pause(_silent(self.hub))
            except AioRpcError as error:
                self._note_cut(retry, started_s)
                await self._recover(error, token, retry)
            finally:
                stream.cancel()

    def _note_cut(self, retry: Retry, since_s: float) -> None:
        """Note that a stream ended that was opened then."""

    async def _recover(self, error: AioRpcError, token: bytes, retry: Retry) -> None:
        """Get ready for the next attempt, or raise when there is none."""
        _honour_cancellation()
        if is_cut(error):
            await retry.pause(self.hub.unreachable(error), is_away=is_away(error))
            return
        answered = raised_from(error)
        if answered.reason not in _REOPENED:
            raise answered from error
        await self.reopen(token)
        await retry.pause(answered)


class MemberSession(SessionCalls):
    """Keeps one member in the run, over cuts and restarts of the hub.

    All calls of the member go through `call` and `run_stream`: they carry the session's token, open
    the session again when it ended, and go on. They raise what the hub answers, such as
    SESSION_FENCED, and NOT_READY when it could not be reached.

    Attributes:
        directive: What the run asks for.
        transfer_token: Secret that sources of weights compare.
        run_clock: The run's clock, as KeepAlives tell it.
    """

    def __init__(
        self,
        *,
        hub: HubChannel,
        keep_alive_hub: HubChannel,
        join: Callable[[SessionResume | None], Awaitable[Session]],
        hooks: MemberHooks,
    ) -> None:
        """Dial nothing yet. `join` opens a session, a fresh one where it gets None."""
        super().__init__(hub, b"")
        self.directive = Directive(kind=DirectiveKind.CONTINUE)
        self.transfer_token = b""
        self._keep_alive_hub = keep_alive_hub
        self._join = join
        self._hooks = hooks
        self.run_clock = RunClock(self._clock)
        self._info: Session | None = None
        self._opening = asyncio.Lock()
        self._sessions = SessionServiceStub(hub.channel)
        self._keep_alive = SessionServiceStub(keep_alive_hub.channel).KeepAlive

    @property
    def info(self) -> Session:
        """The session; open it first.

        Raises:
            AstraflowError: NOT_READY when it was never opened.
        """
        if self._info is None:
            raise AstraflowError(Reason.NOT_READY, "the session was not opened yet; join first")
        return self._info

    @property
    def metadata(self) -> MetadataPairs:
        """What every call of the member carries."""
        return session_metadata(self.info.token)

    async def open(self) -> Session:
        """Join the run for the first time."""
        self._set_info(await self._join(None))
        return self.info

    async def reopen(self, token: bytes) -> None:
        """Open the session again, unless another caller did since `token` was in use."""
        async with self._opening:
            if self.info.token != token:
                return
            log.warning("opening the session again", member_id=self.info.member_id)
            self._set_info(await self._join_again(token))
            self._hooks.opened(self.info)

    async def _join_again(self, token: bytes) -> Session:
        held = self._hooks.held()
        resume = SessionResume(
            resume_token=token,
            incarnation=1,
            held_task_ids=held.task_ids,
            held_batch_ids=held.batch_ids,
        )
        try:
            return await self._join(resume)
        except AstraflowError as error:
            if error.reason is not Reason.TOKEN_INVALID:
                raise
        # The hub does not know the session: it lost its state. A wrong join token fails again.
        return await self._join(None)

    def _set_info(self, session: Session) -> None:
        self._info, self.token = session, session.token
        self._set_transfer_token(session.transfer_token)

    def _set_transfer_token(self, transfer_token: bytes) -> None:
        if transfer_token and transfer_token != self.transfer_token:
            self.transfer_token = transfer_token
            self._hooks.on_transfer_token(transfer_token)

    async def call(
        self, method: Callable[..., Awaitable[Response]], request: object, *, timeout_s: float = 10
    ) -> Response:
        """Make an idempotent call as this member."""
        retry: Retry | None = None
        while True:
            token = self.info.token
            try:
                return await self.hub.call(
                    method, request, metadata=session_metadata(token), timeout_s=timeout_s
                )
            except AstraflowError as error:
                if error.reason not in _REOPENED:
                    raise
                # A hub that restarts again and again ends one session after the other.
                await self.reopen(token)
                retry = retry or self.hub.retry()
                await retry.pause(error)

    async def run_stream(
        self, stream: Callable[[Retry], Awaitable[bool]], *, reconciles: bool = False
    ) -> None:
        """Run a stream and open it again whenever it is cut, until it says that it is done.

        Where it reconciles, the session is opened again after a cut: the run compares what it sent
        with what is held here, and sends what was lost on the way.
        """
        retry = self.hub.retry()
        while True:
            token, started_s = self.info.token, self._clock.monotonic()
            try:
                if await stream(retry):
                    return
                _honour_cancellation()
                await retry.pause(_silent(self.hub))
            except AioRpcError as error:
                self._note_cut(retry, started_s)
                await self._recover(error, token, retry)
            if reconciles:
                await self.reopen(token)

    def _note_cut(self, retry: Retry, since_s: float) -> None:
        """Count anew after a stream that was open while a KeepAlive was answered.

        It may have had nothing to say for longer than hub.patience_s: cuts of it that lie far
        apart are not failures in a row.
        """
        if self.run_clock.has_answer_since(since_s):
            retry.reset()

    async def run(self, *, every_s: float | None = None) -> None:
        """Send KeepAlive until cancelled; the first one at once, for the time that it tells.

        Args:
            every_s: Seconds between two; None: as the run asks for.

        Raises:
            AstraflowError: SESSION_FENCED; RUN_ENDED; NOT_READY when the hub is gone for good.
        """
        retry = self._keep_alive_hub.retry()
        while True:
            await self._beat(retry)
            await asyncio.sleep(every_s or self.info.keep_alive_interval.total_seconds())

    async def _beat(self, retry: Retry) -> None:
        session, asked_s = self.info, self._clock.monotonic()
        try:
            answer = await self._keep_alive(
                _keep_alive_request(self._hooks.load()),
                metadata=session_metadata(session.token),
                timeout=session.ttl.total_seconds(),
            )
        except AioRpcError as error:
            await self._recover(error, session.token, retry)
            return
        retry.reset()
        self.run_clock.update(decode_time(answer.server_time), asked_s=asked_s)
        self._set_transfer_token(answer.transfer_token)
        if answer.HasField("directive"):
            self.take_directive(answer.directive)

    def direct(self, directive: Directive) -> None:
        """Take an order; equal ones count once."""
        if directive != self.directive:
            self.directive = directive
            self._hooks.directed(directive)

    async def report(self, failure: Failure) -> None:
        """Tell the run of what failed beside any rollout."""
        request = pb.ReportFailureRequest(failure=encode_failure(failure))
        await self.call(self._sessions.ReportFailure, request)

    def report_from_thread(self, failure: Failure) -> None:
        """Tell the same while the event loop stands still; blocks.

        Raises:
            grpc.RpcError: It was not heard.
        """
        request = pb.ReportFailureRequest(failure=encode_failure(failure))
        with dial_from_thread(self.hub.address, tls=self.hub.tls) as channel:
            call = SessionServiceStub(channel).ReportFailure
            call(request, metadata=self.metadata, timeout=5)

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


def _silent(hub: HubChannel) -> AstraflowError:
    return AstraflowError(
        Reason.NOT_READY,
        f"the hub at {hub.address} ends every stream at once; look at its log",
        retryable=True,
    )
