"""The run as a trainer sees it: batches in, versions and acks out, all blocking calls."""

import asyncio
from collections.abc import Callable, Coroutine, Generator, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any, Self

from astraflow.client.loop_thread import LoopThread
from astraflow.client.trainer_session import (
    AsyncTrainerClient,
    TrainerHooks,
    TrainerOrders,
    TrainerSession,
    dial_trainer,
)
from astraflow.core.batches import (
    AckBatch,
    BatchHeader,
    BatchOutcome,
    BatchPart,
    EndOfData,
    StreamBatches,
)
from astraflow.core.clock import Clock, SystemClock
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import BatchId
from astraflow.core.members import Directive, RegisterTrainer, Session, TrainerRegistration
from astraflow.core.versions import VersionInfo
from astraflow.rpc.tls import Tls


class OrderedCalls:
    """Runs calls in the order in which they were given; after one that failed none is made."""

    def __init__(
        self, session: TrainerSession, *, on_error: Callable[[AstraflowError], None]
    ) -> None:
        """Start with none.

        Args:
            session: Runs them.
            on_error: Called on the event loop's thread with the first error.
        """
        self._trainer_session = session
        self._on_error = on_error
        self._last: Future[None] | None = None

    def put(self, call: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Make a call after those that were given before."""
        before = self._last
        self._last = self._trainer_session.spawn(self._after(before, call))

    def flush(self) -> None:
        """Wait until all were made.

        Raises:
            AstraflowError: The first error.
        """
        if self._last is not None:
            self._trainer_session.wait(self._last)

    async def _after(
        self, before: Future[None] | None, call: Callable[[], Coroutine[Any, Any, object]]
    ) -> None:
        if before is not None:
            await asyncio.wrap_future(before)
        try:
            await call()
        except AstraflowError as error:
            self._on_error(error)
            raise
        except Exception as error:
            failure = AstraflowError(Reason.INTERNAL, f"a call to the run failed: {error!r}")
            self._on_error(failure)
            raise failure from error


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainerBatch:
    """One rank's share of a batch.

    Attributes:
        header: Of the whole batch.
        parts: header.part_count of them, in order.
        wait_s: Seconds for which the trainer waited for it.
    """

    header: BatchHeader
    parts: tuple[BatchPart, ...]
    wait_s: float


class TrainerClient:
    """A trainer's place in a run, for code that blocks: any framework can be one.

    Example:
        with TrainerClient(hub=address, token=token, register=register) as client:
            client.publish_version(publisher.publish(0, weights, step=0))
            for step, batch in enumerate(client.batches(), start=1):
                metrics = train(batch)
                client.publish_version(publisher.publish(step, weights, step=step))
                client.ack(batch.header.batch_id, BatchOutcome.CONSUMED, step=step, metrics=metrics)

    Iteration ends with the data (`end_of_data` says why) or when the run asks the trainer to
    leave (`directive` says so). A cut stream is opened again and every batch is yielded once.
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
        """Prepare; `with` registers.

        Args:
            hub: host:port.
            token: The run's join token.
            register: What the trainer says of itself.
            tls: None: plain text.
            patience_s: How long the hub is tried again while it cannot be reached.
            loop: A running loop thread to share; None: an own one.
            clock: Tells the time.
        """

        def dial(hooks: TrainerHooks) -> AbstractAsyncContextManager[AsyncTrainerClient]:
            return dial_trainer(
                hub, token=token, register=register, hooks=hooks, tls=tls, patience_s=patience_s
            )

        self._own_loop = LoopThread() if loop is None else None
        self._loop = loop or self._own_loop or LoopThread()
        self._clock = clock or SystemClock()
        self._session = TrainerSession(self._loop, dial=dial, clock=self._clock)
        self._calls = OrderedCalls(self._session, on_error=self._session.queue.close)

    def __enter__(self) -> Self:
        """Register.

        Raises:
            AstraflowError: POLICY_UNKNOWN, POLICY_TAKEN, MODEL_MISMATCH,
                CONTRACT_UNSUPPORTED; TOKEN_INVALID for a wrong join token; NOT_READY when the
                hub could not be reached.
        """
        if self._own_loop is not None:
            self._own_loop.start()
        with ExitStack() as undo:
            undo.callback(self.close)
            self._session.start()
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave; batches that are not settled return to the run."""
        self.close()

    def close(self) -> None:
        """Leave the run and stop the loop thread; idempotent."""
        self._session.close()
        if self._own_loop is not None:
            self._own_loop.close()

    @property
    def registration(self) -> TrainerRegistration:
        """What the run said when it admitted the trainer, last time."""
        return self._session.member.registration

    @property
    def transfer_token(self) -> bytes:
        """The secret that a source of weights compares with what pullers show."""
        return self._session.member.session.transfer_token

    def on_transfer_token(self, listener: Callable[[bytes], None]) -> None:
        """Call back with the transfer token: now, and from the loop's thread when it changes."""
        self._session.listen(listener)

    def on_session(self, listener: Callable[[Session], None]) -> None:
        """Call back with the session: now, and from the loop's thread when it was opened again.

        Its token is what the other ranks of a trainer show, see `RankClient`.
        """
        self._session.listen_for_sessions(listener)

    def on_damage_report(self, listener: Callable[[int], None]) -> None:
        """Call back with a version that a reader could not verify, while batches are read.

        The calls come from the loop's thread and must not block; `Scrub.doubt` is meant for it.
        """
        self._session.listen_for_damage(listener)

    @property
    def directive(self) -> Directive:
        return self._session.member.session.directive

    @property
    def end_of_data(self) -> EndOfData | None:
        """Why no batch follows; None while some may."""
        return self._session.queue.end_of_data

    def take_publish_order(self) -> bool:
        """Return whether the run asked for a version since the last call; other orders stay."""
        return self._session.take_publish_order()

    def take_save_order(self) -> str:
        """Return the newest checkpoint that the run asked for since the last call; empty: none.

        Other orders stay. The ack of the step's batch carries it; a trainer that waits for a batch
        saves at once, and settles its last batch again with it.
        """
        return self._session.take_save_order()

    def order_publish(self) -> None:
        """Have a version published soon, as if the run had asked for it; from any thread."""
        self._session.order_publish()

    def take_orders(self) -> TrainerOrders:
        """Return what the run asked for since the last call."""
        return self._session.take_orders()

    def batches(
        self,
        *,
        rank: int = 0,
        world_size: int = 1,
        max_tokens: int = 0,
        prefetch: int = 1,
        when_asked: Callable[[], None] = lambda: None,
    ) -> Generator[TrainerBatch]:
        """Yield batches until the data ends or the run asks the trainer to leave.

        Args:
            rank: Whose share, 0 .. world_size - 1.
            world_size: Ranks that share every batch.
            max_tokens: Tokens per part, at most; 0: no limit.
            prefetch: Batches unsettled at once; with 1 the next one follows the ack.
            when_asked: Called when the run asks for a version or a checkpoint while there is no
                batch to train on: `take_publish_order` and `take_save_order` say so.

        Raises:
            AstraflowError: SESSION_FENCED, REQUEST_CONFLICT; NOT_READY when the hub is gone.
        """
        share = StreamBatches(
            rank=rank, world_size=world_size, max_tokens=max_tokens, max_outstanding=prefetch
        )
        reading = self._session.read(share)
        try:
            while (batch := self._next(when_asked)) is not None:
                yield batch
        finally:
            reading.cancel()

    def _next(self, when_asked: Callable[[], None]) -> TrainerBatch | None:
        started = self._clock.monotonic()
        with self._session.meter.waiting():
            batch = self._session.queue.take(when_asked)
        if batch is None:
            return None
        self._session.meter.start_batch(
            batch.header.batch_id, sum(part.token_count for part in batch.parts)
        )
        return TrainerBatch(
            header=batch.header, parts=batch.parts, wait_s=self._clock.monotonic() - started
        )

    def publish_version(self, info: VersionInfo, *, checkpoint_id: str = "") -> int:
        """Announce weights that can now be pulled; return the number of the next version.

        Raises:
            AstraflowError: VERSION_NOT_NEXT, REQUEST_CONFLICT; NOT_READY when the hub is gone.
        """
        return self._session.call(self._session.member.publish(info, checkpoint_id=checkpoint_id))

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
            await self._session.member.publish(known)
            then()

        self._calls.put(publish)

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
        return self._session.call(self._acknowledge(ack))

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

        self._calls.put(acknowledge)

    def flush(self) -> None:
        """Wait for what was announced and settled.

        Raises:
            AstraflowError: As `publish_version` and `ack` do.
        """
        self._calls.flush()

    async def _acknowledge(self, ack: AckBatch) -> bool:
        try:
            return await self._session.member.acknowledge(ack)
        finally:
            self._session.queue.discard(ack.batch_id)
            is_trained = ack.outcome is BatchOutcome.CONSUMED
            self._session.meter.end_batch(ack.batch_id, step=ack.step, is_trained=is_trained)
