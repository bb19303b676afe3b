"""The run as a trainer sees it: batches in, versions and acks out, all blocking calls."""

import asyncio
from collections.abc import Callable, Coroutine, Generator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Self, TypeVar

from astraflow.client.batch_stream import BatchSink, BatchStream
from astraflow.client.duplex import beside
from astraflow.client.loop_thread import LoopThread
from astraflow.client.session import Held
from astraflow.client.shelf import Shelf
from astraflow.client.trainer_load import TrainerLoadMeter
from astraflow.client.trainer_member import TrainerHooks, TrainerMember, dial_trainer
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
from astraflow.core.members import (
    Directive,
    DirectiveKind,
    RegisterTrainer,
    Session,
    TrainerRegistration,
)
from astraflow.core.versions import VersionInfo
from astraflow.rpc.tls import Tls

Result = TypeVar("Result")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOrders:
    """What the run asked for since the last look, to be done after the step in progress.

    Attributes:
        publish: A version.
        checkpoint_ids: Checkpoints under these ids; the ack of the step's batch carries one.
    """

    publish: bool = False
    checkpoint_ids: tuple[str, ...] = ()


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
        self._dial = partial(
            dial_trainer, hub, token=token, register=register, tls=tls, patience_s=patience_s
        )
        self._own_loop = LoopThread() if loop is None else None
        self._loop = loop or self._own_loop or LoopThread()
        self._clock = clock or SystemClock()
        self._meter = TrainerLoadMeter(self._clock)
        self._shelf = Shelf()
        self._orders: SimpleQueue[TrainerOrders] = SimpleQueue()
        self._token_listeners: list[Callable[[bytes], None]] = []
        self._entered: Future[TrainerMember] = Future()
        self._life: Future[None] = Future()
        self._leaving: asyncio.Event | None = None
        self._error: AstraflowError | None = None

    def __enter__(self) -> Self:
        """Register.

        Raises:
            AstraflowError: POLICY_UNKNOWN, POLICY_TAKEN, MODEL_MISMATCH,
                CONTRACT_UNSUPPORTED; TOKEN_INVALID for a wrong join token; NOT_READY when the
                hub could not be reached.
        """
        if self._own_loop is not None:
            self._own_loop.start()
        self._life = self._loop.spawn(self._live())
        self._life.add_done_callback(self._died)
        try:
            self._entered.result()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Leave; batches that are not settled return to the run."""
        self.close()

    def close(self) -> None:
        """Leave the run and stop the loop thread; idempotent."""
        if not self._entered.done():
            self._life.cancel()
        if not self._life.done():
            self._loop.call(self._leave())
        with suppress(AstraflowError, CancelledError):
            self._life.result()
        if self._own_loop is not None:
            self._own_loop.close()

    @property
    def registration(self) -> TrainerRegistration:
        """What the run said when it admitted the trainer, last time."""
        return self._member.registration

    @property
    def transfer_token(self) -> bytes:
        """The secret that a source of weights compares with what pullers show."""
        return self._member.keeper.transfer_token

    def on_transfer_token(self, listener: Callable[[bytes], None]) -> None:
        """Call back with the transfer token: now, and from the loop's thread when it changes."""
        self._token_listeners.append(listener)
        listener(self.transfer_token)

    @property
    def directive(self) -> Directive:
        """What the run asks for."""
        return self._member.keeper.directive

    @property
    def end_of_data(self) -> EndOfData | None:
        """Why no batch follows; None while some may."""
        return self._shelf.end_of_data

    def take_orders(self) -> TrainerOrders:
        """Return what the run asked for since the last call."""
        orders: list[TrainerOrders] = []
        with suppress(Empty):
            while True:
                orders.append(self._orders.get_nowait())
        return TrainerOrders(
            publish=any(order.publish for order in orders),
            checkpoint_ids=tuple(i for order in orders for i in order.checkpoint_ids),
        )

    def batches(
        self, *, rank: int = 0, world_size: int = 1, max_tokens: int = 0, prefetch: int = 1
    ) -> Generator[TrainerBatch]:
        """Yield batches until the data ends or the run asks the trainer to leave.

        Args:
            rank: Whose share, 0 .. world_size - 1.
            world_size: Ranks that share every batch.
            max_tokens: Tokens per part, at most; 0: no limit.
            prefetch: Batches unsettled at once; with 1 the next one follows the ack.

        Raises:
            AstraflowError: SESSION_FENCED, REQUEST_CONFLICT; NOT_READY when the hub is gone.
        """
        share = StreamBatches(
            rank=rank, world_size=world_size, max_tokens=max_tokens, max_outstanding=prefetch
        )
        reading = self._loop.spawn(self._read(share))
        reading.add_done_callback(self._died)
        try:
            while (batch := self._next()) is not None:
                yield batch
        finally:
            reading.cancel()

    def _next(self) -> TrainerBatch | None:
        started = self._clock.monotonic()
        with self._meter.waiting():
            batch = self._shelf.take()
        if batch is None:
            return None
        self._meter.took(batch.header.batch_id, sum(part.token_count for part in batch.parts))
        return TrainerBatch(
            header=batch.header, parts=batch.parts, wait_s=self._clock.monotonic() - started
        )

    def publish_version(self, info: VersionInfo, *, checkpoint_id: str = "") -> int:
        """Announce weights that can now be pulled; return the number of the next version.

        Raises:
            AstraflowError: VERSION_NOT_NEXT, REQUEST_CONFLICT; NOT_READY when the hub is gone.
        """
        return self._call(self._member.publish(info, checkpoint_id=checkpoint_id))

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
            wait=timedelta(seconds=wait_s),
            train=timedelta(seconds=train_s),
            metrics=metrics or {},
            checkpoint_id=checkpoint_id,
        )
        try:
            return self._call(self._member.acknowledge(ack))
        finally:
            self._shelf.settle(batch_id)
            self._meter.settled(batch_id, step=step, is_trained=outcome is BatchOutcome.CONSUMED)

    @property
    def _member(self) -> TrainerMember:
        if not self._entered.done():
            raise AstraflowError(
                Reason.NOT_READY, "register first: with TrainerClient(...) as client"
            )
        return self._entered.result()

    def _call(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a call on the loop; fail at once when the session is over."""
        if self._life.done():
            coroutine.close()
            raise self._error or AstraflowError(
                Reason.SESSION_ENDED, "the trainer has left the run"
            )
        return self._loop.call(coroutine)

    async def _live(self) -> None:
        """Hold the session from the registration until `_leave`."""
        self._leaving = asyncio.Event()
        hooks = TrainerHooks(
            load=self._meter.report,
            held=lambda: Held(batch_ids=self._shelf.held),
            opened=self._reopened,
            directed=self._directed,
            entrusted=self._entrusted,
        )
        async with self._dial(hooks=hooks) as member:
            await member.keeper.open()
            self._entered.set_result(member)
            async with beside(member.keeper.run()):
                await self._leaving.wait()
            await member.keeper.end("the trainer leaves")

    async def _leave(self) -> None:
        if self._leaving is not None:
            self._leaving.set()

    async def _read(self, share: StreamBatches) -> None:
        """Fill the shelf until the data ends."""
        sink = BatchSink(
            batch=self._shelf.put,
            publish=lambda: self._orders.put(TrainerOrders(publish=True)),
            save=lambda name: self._orders.put(TrainerOrders(checkpoint_ids=(name,))),
        )
        stream = BatchStream(self._member.keeper, share=share, sink=sink)
        await stream.run()
        if stream.end_of_data is not None:
            self._shelf.end(stream.end_of_data)

    def _died(self, future: "Future[None]") -> None:
        """Tell the trainer's thread that the session or the stream is over."""
        if future.cancelled():
            return
        error = future.exception()
        if error is None:
            return
        if not isinstance(error, AstraflowError):
            error = AstraflowError(Reason.INTERNAL, f"the trainer's client failed: {error!r}")
        self._error = self._error or error
        if not self._entered.done():
            self._entered.set_exception(error)
        self._shelf.close(error)

    def _reopened(self, session: Session) -> None:
        self._shelf.keep(session.held_batch_ids)

    def _directed(self, directive: Directive) -> None:
        if directive.kind is not DirectiveKind.CONTINUE:
            self._shelf.close()

    def _entrusted(self, token: bytes) -> None:
        for listener in self._token_listeners:
            listener(token)
