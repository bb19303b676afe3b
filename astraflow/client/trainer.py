"""The run as a trainer sees it: batches in, versions and acks out, all blocking calls."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Generator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack, aclosing, closing, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, Self, TypeVar

from astraflow.client.batch_stream import (
    DamageReport,
    ItemQueue,
    PublishOrder,
    SaveOrder,
    TrainerBatch,
    TrainerItem,
    batch_items,
)
from astraflow.client.loop_thread import LoopThread
from astraflow.client.session import Held, MemberHooks
from astraflow.client.trainer_session import AsyncTrainerClient, TrainerLoadMeter, dial_trainer
from astraflow.core.batches import AckBatch, BatchOutcome, EndOfData, StreamBatches
from astraflow.core.clock import Clock, SystemClock
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import BatchId
from astraflow.core.members import (
    Directive,
    DirectiveKind,
    RegisterTrainer,
    Session,
    TrainerRegistration,
)
from astraflow.core.versions import VersionInfo
from astraflow.rpc.concurrency import beside
from astraflow.rpc.tls import Tls

__all__ = [
    "DamageReport",
    "PublishOrder",
    "SaveOrder",
    "TrainerBatch",
    "TrainerClient",
    "TrainerItem",
]

UNREADABLE_COUNT: Final = 16
"""Batches in a row whose payloads are lost; then something is wrong with the store."""

# Between two questions whether it may leave.
_HEAR_S: Final = 0.5

Result = TypeVar("Result")


class TrainerClient:
    """A trainer's place in a run, for code that blocks: any framework can be one.

    Example:
        with TrainerClient(hub=address, token=token, register=register) as client:
            client.publish_version(publisher.publish(0, weights, step=0))
            for step, batch in enumerate(client.batches(), start=1):
                metrics = train(batch)
                client.publish_version(publisher.publish(step, weights, step=step))
                client.ack(batch.header.batch_id, BatchOutcome.CONSUMED, step=step, metrics=metrics)

    `items` has what else the run asks for. Iteration ends with the data (`end_of_data` says why) or
    when the run asks the trainer to leave (`directive` says so). A cut stream is opened again and
    every batch is yielded once.
    """

    def __init__(
        self,
        *,
        hub: str,
        token: str,
        register: RegisterTrainer,
        tls: Tls | None = None,
        patience_s: float = 30.0,
        loop: LoopThread | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Hold no session; `with` registers.

        Args:
            hub: host:port.
            token: The run's join token.
            register: What the trainer says of itself.
            tls: None: plain text.
            patience_s: How long the hub is tried again while it cannot be reached.
            loop: A running loop thread to share; None: an own one.
            clock: Tells the time.
        """
        self._loop = loop or LoopThread()
        self._owns_loop = loop is None
        self._clock = clock or SystemClock()
        self._dial = partial(
            dial_trainer, hub, token=token, register=register, tls=tls, patience_s=patience_s
        )
        self._queue = ItemQueue()
        self._meter = TrainerLoadMeter(self._clock)
        self._waited_s = 0.0
        self._unreadable_count = 0
        self._token_listeners: list[Callable[[bytes], None]] = []
        self._session_listeners: list[Callable[[Session], None]] = []
        self._registered: Future[AsyncTrainerClient] = Future()
        self._running: Future[None] = Future()
        self._leaving = asyncio.Event()
        self._dismissed = threading.Event()
        self._error: AstraflowError | None = None
        self._last_call: Future[None] | None = None

    def __enter__(self) -> Self:
        """Register.

        Raises:
            AstraflowError: POLICY_UNKNOWN, POLICY_TAKEN, MODEL_MISMATCH,
                CONTRACT_UNSUPPORTED; TOKEN_INVALID for a wrong join token; NOT_READY when the
                hub could not be reached.
        """
        if self._owns_loop:
            self._loop.start()
        with ExitStack() as undo:
            undo.callback(self.close)
            self._running = self._loop.spawn(self._run())
            self._running.add_done_callback(self._ended)
            self._registered.result()
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave; batches that are not settled return to the run."""
        self.close()

    def close(self) -> None:
        """Leave the run and stop the loop thread; idempotent."""
        if not self._registered.done():
            self._running.cancel()
        if not self._running.done():
            self._loop.call(self._leave())
        with suppress(AstraflowError, CancelledError):
            self._running.result()
        if self._owns_loop:
            self._loop.close()

    @property
    def _member(self) -> AsyncTrainerClient:
        if not self._registered.done():
            raise AstraflowError(
                Reason.NOT_READY, "register first: `with TrainerClient(...) as client:`"
            )
        return self._registered.result()

    @property
    def registration(self) -> TrainerRegistration:
        """What the run said when it admitted the trainer, last time."""
        return self._member.registration

    @property
    def transfer_token(self) -> bytes:
        """The secret that a source of weights compares with what pullers show."""
        return self._member.session.transfer_token

    def on_transfer_token(self, listener: Callable[[bytes], None]) -> None:
        """Call back with the transfer token: now, and from the loop's thread when it changes."""
        self._token_listeners.append(listener)
        listener(self.transfer_token)

    def on_session(self, listener: Callable[[Session], None]) -> None:
        """Call back with the session: now, and from the loop's thread when it was opened again.

        Its token is what the other ranks of a trainer show, see `RankClient`.
        """
        self._session_listeners.append(listener)
        listener(self._member.session.info)

    @property
    def directive(self) -> Directive:
        return self._member.session.directive

    @property
    def end_of_data(self) -> EndOfData | None:
        """Why no batch follows; None while some may."""
        return self._queue.end_of_data

    def stay(self) -> None:
        """Wait, after the end of the data, until the run has no more use for this trainer.

        Other policies may go on and last evaluations be under way: nodes that join meanwhile get
        this policy's weights from whoever serves them.
        """
        # No stream is open that would tell.
        hearing = self._loop.spawn(self._member.session.run(every_s=_HEAR_S))
        try:
            self._dismissed.wait()
        finally:
            hearing.cancel()

    def order_publish(self) -> None:
        """Have a version published soon, as if the run had asked for it; from any thread."""
        self._queue.put(PublishOrder())

    def items(
        self, *, rank: int = 0, world_size: int = 1, max_tokens: int = 0, prefetch: int = 1
    ) -> Generator[TrainerItem]:
        """Yield batches, and what the run asks for between two of them.

        Ends with the data, or when the run asks the trainer to leave. What is asked for during a
        step comes before the next batch.

        Args:
            rank: Whose share, 0 .. world_size - 1.
            world_size: Ranks that share every batch.
            max_tokens: Tokens per part, at most; 0: no limit.
            prefetch: Batches without an ack at once; with 1 the next one follows the ack.

        Raises:
            AstraflowError: SESSION_FENCED, REQUEST_CONFLICT; NOT_READY when the hub is gone.
        """
        share = StreamBatches(
            rank=rank, world_size=world_size, max_tokens=max_tokens, max_outstanding=prefetch
        )
        reading = self._loop.spawn(self._read(share))
        reading.add_done_callback(self._ended)
        try:
            while (item := self._next()) is not None:
                yield item
        finally:
            reading.cancel()

    def batches(
        self, *, rank: int = 0, world_size: int = 1, max_tokens: int = 0, prefetch: int = 1
    ) -> Generator[TrainerBatch]:
        """Yield batches alone, as `items`; what else the run asks for is left out."""
        items = self.items(
            rank=rank, world_size=world_size, max_tokens=max_tokens, prefetch=prefetch
        )
        with closing(items):
            yield from (item for item in items if isinstance(item, TrainerBatch))

    def _next(self) -> TrainerItem | None:
        started = self._clock.monotonic()
        with self._meter.waiting():
            item = self._readable()
        self._waited_s += self._clock.monotonic() - started
        if isinstance(item, TrainerBatch):
            token_count = sum(part.token_count for part in item.parts)
            self._meter.start_batch(item.header.batch_id, token_count)
            item = replace(item, wait_s=self._waited_s)
            self._waited_s = 0.0
        return item

    def _readable(self) -> TrainerItem | None:
        """Return the next item; batches that cannot be read return to the run.

        Raises:
            AstraflowError: PAYLOAD_LOST once too many in a row could not.
        """
        while True:
            item = self._queue.take()
            if not isinstance(item, TrainerBatch):
                return item
            if item.error is None:
                self._unreadable_count = 0
                return item
            self._unreadable_count += 1
            if self._unreadable_count > UNREADABLE_COUNT:
                raise item.error
            self._call(self._member.return_unreadable(item.header.batch_id, item.error))
            self._queue.discard(item.header.batch_id)

    def publish_version(self, info: VersionInfo, *, checkpoint_id: str = "") -> int:
        """Announce weights that can now be pulled; return the number of the next version.

        Raises:
            AstraflowError: VERSION_NOT_NEXT, REQUEST_CONFLICT; NOT_READY when the hub is gone.
        """
        return self._call(self._member.publish(info, checkpoint_id=checkpoint_id))

    def announce(
        self, info: VersionInfo | Future[VersionInfo], *, then: Callable[[], None] = lambda: None
    ) -> None:
        """Announce weights once they can be pulled, while the caller goes on.

        Calls of this kind are made in order; `flush` waits for them, and raises what they came to.

        Args:
            info: Of the version, or what it is still made by.
            then: Called on another thread once the run knows it; returns at once.
        """

        async def publish() -> None:
            known = await asyncio.wrap_future(info) if isinstance(info, Future) else info
            await self._member.publish(known)
            then()

        self._call_later(publish)

    def ack(
        self,
        batch_id: BatchId,
        outcome: BatchOutcome,
        *,
        step: int,
        rank: int | None = None,
        metrics: Mapping[str, float] | None = None,
        wait_s: float = 0.0,
        train_s: float = 0.0,
        checkpoint_id: str = "",
    ) -> bool:
        """Settle a batch; return False while other ranks have yet to.

        Args:
            batch_id: Which.
            outcome: What became of it.
            step: Optimizer steps done, this batch included.
            rank: Whose share; None: all of it.
            metrics: Numbers for the log, such as loss.
            wait_s: Seconds waited for it; see TrainerBatch.
            train_s: Seconds from the batch to this call.
            checkpoint_id: Of a checkpoint written after this batch; empty: none.

        Raises:
            AstraflowError: BATCH_UNKNOWN, LEASE_LOST, REQUEST_CONFLICT; NOT_READY when the hub
                is gone.
        """
        ack = AckBatch(
            batch_id=batch_id,
            outcome=outcome,
            step=step,
            rank=rank,
            wait_s=wait_s,
            train_s=train_s,
            metrics=metrics or {},
            checkpoint_id=checkpoint_id,
        )
        return self._call(self._acknowledge(ack))

    def ack_later(
        self,
        ack: AckBatch,
        *,
        more: Callable[[], Mapping[str, float]] = dict[str, float],
        checkpoint: Future[str] | None = None,
    ) -> None:
        """Settle a batch while the caller goes on, after what was announced before.

        Args:
            ack: What became of it.
            more: Returns further metrics: called on another thread, once the run knows all that was
                announced before.
            checkpoint: Id of one of the weights behind it, for which this waits; None: there is
                none, or it is in the ack.
        """

        async def acknowledge() -> None:
            name = ack.checkpoint_id
            if checkpoint is not None:
                name = await asyncio.wrap_future(checkpoint)
            metrics = {**ack.metrics, **more()}
            await self._acknowledge(replace(ack, metrics=metrics, checkpoint_id=name))

        self._call_later(acknowledge)

    def flush(self) -> None:
        """Wait for what was announced and settled.

        Raises:
            AstraflowError: As `publish_version` and `ack` do.
        """
        if self._last_call is not None:
            self._loop.wait(self._last_call)

    async def _acknowledge(self, ack: AckBatch) -> bool:
        try:
            return await self._member.acknowledge(ack)
        finally:
            self._queue.discard(ack.batch_id)
            is_trained = ack.outcome is BatchOutcome.CONSUMED
            self._meter.end_batch(ack.batch_id, step=ack.step, is_trained=is_trained)

    def _call(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a call on the loop; fail at once when the session is over."""
        self._require_running(coroutine)
        return self._loop.call(coroutine)

    def _call_later(self, call: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Make a call after those that were given before; after one that failed none is made."""
        after = self._after(self._last_call, call)
        self._require_running(after)
        self._last_call = self._loop.spawn(after)

    async def _after(
        self, before: Future[None] | None, call: Callable[[], Coroutine[Any, Any, object]]
    ) -> None:
        if before is not None:
            await asyncio.wrap_future(before)
        try:
            await call()
        except AstraflowError as error:
            self._queue.close(error)
            raise
        except Exception as error:
            failure = AstraflowError(Reason.INTERNAL, f"a call to the run failed: {error!r}")
            self._queue.close(failure)
            raise failure from error

    def _require_running(self, coroutine: Coroutine[Any, Any, object]) -> None:
        if self._running.done():
            coroutine.close()
            raise self._error or AstraflowError(Reason.SESSION_ENDED, "the trainer has left")

    async def _run(self) -> None:
        """Hold the session from the registration until `_leave`."""
        hooks = MemberHooks(
            load=self._meter.report,
            held=lambda: Held(batch_ids=self._queue.name_held()),
            opened=self._reopened,
            directed=self._directed,
            on_transfer_token=self._notify_transfer_token,
        )
        async with self._dial(hooks=hooks) as member:
            await member.session.open()
            self._registered.set_result(member)
            async with beside(member.session.run()):
                await self._leaving.wait()
            await member.session.end("the trainer leaves")

    async def _leave(self) -> None:
        self._leaving.set()

    async def _read(self, share: StreamBatches) -> None:
        """Fill the queue until the data ends."""
        async with aclosing(batch_items(self._member.session, share)) as items:
            async for item in items:
                self._queue.put(item)

    def _ended(self, future: "Future[None]") -> None:
        """Tell the trainer's thread that the session or the stream is over."""
        if future is self._running:
            self._dismissed.set()
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
        self._queue.close(error)

    def _reopened(self, session: Session) -> None:
        self._queue.keep(session.held_batch_ids)
        for listener in self._session_listeners:
            listener(session)

    def _directed(self, directive: Directive) -> None:
        if directive.kind is not DirectiveKind.CONTINUE:
            self._dismissed.set()
            self._queue.close()

    def _notify_transfer_token(self, token: bytes) -> None:
        for listener in self._token_listeners:
            listener(token)
