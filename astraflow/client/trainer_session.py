"""A trainer's place in a run, on an event loop: its session, its calls, its load."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from threading import Event, Lock
from typing import Any, TypeVar

from astraflow.client.batch_stream import BatchQueue, BatchSink, BatchStream
from astraflow.client.hub import HubChannel, dial_twice
from astraflow.client.loop_thread import LoopThread
from astraflow.client.session import Held, MemberHooks, MemberSession
from astraflow.core.batches import AckBatch, BatchOutcome, StreamBatches
from astraflow.core.clock import Clock
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import BatchId
from astraflow.core.members import (
    Directive,
    DirectiveKind,
    RegisterTrainer,
    Session,
    SessionResume,
    TrainerLoad,
    TrainerRegistration,
)
from astraflow.core.versions import VersionInfo
from astraflow.rpc.auth import bearer
from astraflow.rpc.concurrency import beside
from astraflow.rpc.tls import Tls
from astraflow.wire.trainer import (
    decode_trainer_registration,
    encode_ack_batch,
    encode_register_trainer,
)
from astraflow.wire.versions import encode_version_info
from astraflow_proto.dataflow.v1 import trainer_service_pb2 as pb
from astraflow_proto.dataflow.v1.trainer_service_pb2_grpc import TrainerServiceStub


class TrainerLoadMeter:
    """Adds up between two reports; used by the trainer's thread and by the event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = Lock()
        self._tokens: dict[BatchId, int] = {}
        self._step = 0
        self._trained_count = 0
        self._waited_s = 0.0
        self._waiting_since: float | None = None
        self._reported_at = clock.monotonic()

    @contextmanager
    def waiting(self) -> Generator[None]:
        """Count the time in the body as waiting for a batch."""
        with self._lock:
            self._waiting_since = self._clock.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._count_wait(self._clock.monotonic())
                self._waiting_since = None

    def start_batch(self, batch_id: BatchId, token_count: int) -> None:
        """Note a batch that is trained on from now."""
        with self._lock:
            self._tokens[batch_id] = token_count

    def end_batch(self, batch_id: BatchId, *, step: int, is_trained: bool) -> None:
        """Note what became of a batch."""
        with self._lock:
            token_count = self._tokens.pop(batch_id, 0)
            if is_trained:
                self._step = step
                self._trained_count += token_count

    def report(self) -> TrainerLoad:
        """Return the load since the last report, and begin a new one."""
        with self._lock:
            now = self._clock.monotonic()
            self._count_wait(now)
            span_s = max(now - self._reported_at, 1e-9)
            load = TrainerLoad(
                step=self._step,
                held_batch_count=len(self._tokens),
                tokens_per_s=self._trained_count / span_s,
                wait_fraction=min(1.0, self._waited_s / span_s),
            )
            self._reported_at, self._trained_count, self._waited_s = now, 0, 0.0
            return load

    def _count_wait(self, now: float) -> None:
        if self._waiting_since is not None:
            self._waited_s += now - self._waiting_since
            self._waiting_since = now


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerHooks:
    """What the run asks of a trainer; called on the event loop.

    Attributes:
        load: How busy it is.
        held: Batches that it works on.
        opened: The session was opened again: what it does not list is no longer its own.
        directed: The run asks for something else than before.
        on_transfer_token: The transfer token is another one.
    """

    load: Callable[[], TrainerLoad]
    held: Callable[[], Held]
    opened: Callable[[Session], None]
    directed: Callable[[Directive], None]
    on_transfer_token: Callable[[bytes], None]


class AsyncTrainerClient:
    """Registers, acknowledges, publishes; `TrainerClient` is the same for callers that block.

    Attributes:
        session: The member's.
    """

    def __init__(
        self,
        *,
        hub: HubChannel,
        keep_alive_hub: HubChannel,
        token: str,
        register: RegisterTrainer,
        hooks: TrainerHooks,
    ) -> None:
        self._hub = hub
        self._token = token
        self._request = register
        self._stub = TrainerServiceStub(hub.channel)
        self._registration: TrainerRegistration | None = None
        self.session = MemberSession(
            hub=hub,
            keep_alive_hub=keep_alive_hub,
            hooks=MemberHooks(
                join=self._register,
                load=hooks.load,
                held=hooks.held,
                opened=hooks.opened,
                directed=hooks.directed,
                on_transfer_token=hooks.on_transfer_token,
            ),
        )

    @property
    def registration(self) -> TrainerRegistration:
        """What the run said at the last registration.

        Raises:
            AstraflowError: NOT_READY before the first one.
        """
        if self._registration is None:
            raise AstraflowError(Reason.NOT_READY, "the trainer is not registered yet")
        return self._registration

    async def acknowledge(self, ack: AckBatch) -> bool:
        """Settle a batch; return False while other ranks have yet to.

        Raises:
            AstraflowError: BATCH_UNKNOWN, LEASE_LOST, REQUEST_CONFLICT.
        """
        answer = await self.session.call(self._stub.AckBatch, encode_ack_batch(ack))
        if ack.outcome is BatchOutcome.CONSUMED:
            self._request = replace(self._request, last_step=ack.step, checkpoint_id="")
        return answer.settled

    async def publish(self, info: VersionInfo, *, checkpoint_id: str = "") -> int:
        """Announce weights that can now be pulled; return the number of the next version.

        Raises:
            AstraflowError: VERSION_NOT_NEXT, REQUEST_CONFLICT.
        """
        request = pb.PublishVersionRequest(
            version=encode_version_info(info), checkpoint_id=checkpoint_id
        )
        answer = await self.session.call(self._stub.PublishVersion, request)
        # One that gained patches may be older than the last one.
        newest = max(info.version, -1 if self._request.version is None else self._request.version)
        self._request = replace(self._request, version=newest)
        return answer.next_version

    async def _register(self, resume: SessionResume | None) -> Session:
        answer = await self._hub.call(
            self._stub.RegisterTrainer,
            encode_register_trainer(replace(self._request, resume=resume)),
            metadata=bearer(self._token),
        )
        self._registration = decode_trainer_registration(answer)
        return self._registration.session


@asynccontextmanager
async def dial_trainer(
    address: str,
    *,
    token: str,
    register: RegisterTrainer,
    hooks: TrainerHooks,
    tls: Tls | None = None,
    patience_s: float = 30.0,
) -> AsyncGenerator[AsyncTrainerClient]:
    """Return a member whose channels are closed at the end; nothing is registered yet."""
    async with dial_twice(address, tls=tls, patience_s=patience_s) as (hub, keep_alive_hub):
        yield AsyncTrainerClient(
            hub=hub, keep_alive_hub=keep_alive_hub, token=token, register=register, hooks=hooks
        )


Result = TypeVar("Result")


# Makes a member that is not registered yet; its channels are closed at the end.
Dial = Callable[[TrainerHooks], AbstractAsyncContextManager[AsyncTrainerClient]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOrders:
    """What the run asked for since the last look, to be done after the step in progress.

    Attributes:
        publish: A version.
        checkpoint_ids: Checkpoints under these ids; the ack of the step's batch carries one.
    """

    publish: bool = False
    checkpoint_ids: tuple[str, ...] = ()


class TrainerSession:
    """One registration, from `start` to `close`; used from the trainer's thread.

    Attributes:
        queue: Where batches wait.
        meter: How busy the trainer is.
    """

    def __init__(self, loop: LoopThread, *, dial: Dial, clock: Clock) -> None:
        self.queue = BatchQueue()
        self.meter = TrainerLoadMeter(clock)
        self._loop = loop
        self._dial = dial
        self._saves: SimpleQueue[str] = SimpleQueue()
        self._publish_order = Event()
        self._token_listeners: list[Callable[[bytes], None]] = []
        self._damage_listeners: list[Callable[[int], None]] = []
        self._session_listeners: list[Callable[[Session], None]] = []
        self._registered: Future[AsyncTrainerClient] = Future()
        self._running: Future[None] = Future()
        self._leaving: asyncio.Event | None = None
        self._error: AstraflowError | None = None

    def start(self) -> None:
        """Register.

        Raises:
            AstraflowError: What the hub answered; NOT_READY when it could not be reached.
        """
        self._running = self._loop.spawn(self._run())
        self._running.add_done_callback(self._ended)
        self._registered.result()

    def close(self) -> None:
        """Leave the run; idempotent."""
        if not self._registered.done():
            self._running.cancel()
        if not self._running.done():
            self._loop.call(self._leave())
        with suppress(AstraflowError, CancelledError):
            self._running.result()

    @property
    def member(self) -> AsyncTrainerClient:
        """The member.

        Raises:
            AstraflowError: NOT_READY before the registration.
        """
        if not self._registered.done():
            raise AstraflowError(
                Reason.NOT_READY, "register first: `with TrainerClient(...) as client:`"
            )
        return self._registered.result()

    def call(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a call on the loop; fail at once when the session is over."""
        self._require_running(coroutine)
        return self._loop.call(coroutine)

    def spawn(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run a call on the loop beside the caller; fail at once when the session is over."""
        self._require_running(coroutine)
        return self._loop.spawn(coroutine)

    def wait(self, future: Future[Result]) -> Result:
        """Wait for what was spawned; whatever it raises is raised here."""
        return self._loop.wait(future)

    def _require_running(self, coroutine: Coroutine[Any, Any, object]) -> None:
        if self._running.done():
            coroutine.close()
            raise self._error or AstraflowError(Reason.SESSION_ENDED, "the trainer has left")

    def read(self, share: StreamBatches) -> Future[None]:
        """Fill the queue until the data ends or the future is cancelled."""
        reading = self._loop.spawn(self._read(share))
        reading.add_done_callback(self._ended)
        return reading

    def listen(self, listener: Callable[[bytes], None]) -> None:
        """Call back with the transfer token, now and when it changes."""
        self._token_listeners.append(listener)
        listener(self.member.session.transfer_token)

    def listen_for_sessions(self, listener: Callable[[Session], None]) -> None:
        """Call back with the session, now and when it was opened again."""
        self._session_listeners.append(listener)
        listener(self.member.session.info)

    def listen_for_damage(self, listener: Callable[[int], None]) -> None:
        """Call back with the version whenever a reader could not verify one."""
        self._damage_listeners.append(listener)

    def take_orders(self) -> TrainerOrders:
        """Return what the run asked for since the last call."""
        return TrainerOrders(
            publish=self.take_publish_order(), checkpoint_ids=tuple(self._take_saves())
        )

    def _take_saves(self) -> list[str]:
        asked: list[str] = []
        with suppress(Empty):
            while True:
                asked.append(self._saves.get_nowait())
        return asked

    def take_save_order(self) -> str:
        """Return the newest checkpoint that the run asked for since the last call; empty: none."""
        return next(reversed(self._take_saves()), "")

    def take_publish_order(self) -> bool:
        """Return whether the run asked for a version since the last call."""
        is_asked = self._publish_order.is_set()
        self._publish_order.clear()
        return is_asked

    async def _run(self) -> None:
        """Hold the session from the registration until `_leave`."""
        self._leaving = asyncio.Event()
        hooks = TrainerHooks(
            load=self.meter.report,
            held=lambda: Held(batch_ids=self.queue.held),
            opened=self._reopened,
            directed=self._directed,
            on_transfer_token=self._notify_transfer_token,
        )
        async with self._dial(hooks) as member:
            await member.session.open()
            self._registered.set_result(member)
            async with beside(member.session.run()):
                await self._leaving.wait()
            await member.session.end("the trainer leaves")

    async def _leave(self) -> None:
        if self._leaving is not None:
            self._leaving.set()

    async def _read(self, share: StreamBatches) -> None:
        """Fill the queue until the data ends."""
        sink = BatchSink(
            batch=self.queue.put,
            publish=self.order_publish,
            save=self._order_save,
            doubt=self._notify_damage,
        )
        stream = BatchStream(self.member.session, share=share, sink=sink)
        await stream.run()
        if stream.end_of_data is not None:
            self.queue.end(stream.end_of_data)

    def order_publish(self) -> None:
        """Have a version published soon, by whoever trains or waits for a batch."""
        self._publish_order.set()
        self.queue.nudge()

    def _order_save(self, checkpoint_id: str) -> None:
        self._saves.put(checkpoint_id)
        self.queue.nudge()

    def _ended(self, future: "Future[None]") -> None:
        """Tell the trainer's thread that the session or the stream is over."""
        if future.cancelled():
            # A reading is cancelled by who reads; a session only together with its loop.
            if future is not self._running:
                return
            error = AstraflowError(Reason.SESSION_ENDED, "the trainer's client was stopped")
        else:
            error = future.exception()
        if error is None:
            return
        if not isinstance(error, AstraflowError):
            error = AstraflowError(Reason.INTERNAL, f"the trainer's client failed: {error!r}")
        self._error = self._error or error
        if not self._registered.done():
            self._registered.set_exception(error)
        self.queue.close(error)

    def _reopened(self, session: Session) -> None:
        self.queue.keep(session.held_batch_ids)
        for listener in self._session_listeners:
            listener(session)

    def _directed(self, directive: Directive) -> None:
        if directive.kind is not DirectiveKind.CONTINUE:
            self.queue.close()

    def _notify_damage(self, version: int) -> None:
        for listener in self._damage_listeners:
            listener(version)

    def _notify_transfer_token(self, token: bytes) -> None:
        for listener in self._token_listeners:
            listener(token)
