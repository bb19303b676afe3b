"""What a TrainerClient does on its event loop: the session, the stream, the calls."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Event
from typing import Any, Protocol, TypeVar

from astraflow.client.batch_stream import BatchSink, BatchStream
from astraflow.client.duplex import beside
from astraflow.client.hooks import Held
from astraflow.client.loop_thread import LoopThread
from astraflow.client.shelf import Shelf
from astraflow.client.trainer_load import TrainerLoadMeter
from astraflow.client.trainer_member import TrainerHooks, TrainerMember
from astraflow.core.batches import StreamBatches
from astraflow.core.clock import Clock
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.members import Directive, DirectiveKind, Session

Result = TypeVar("Result")


class Dial(Protocol):
    """Makes a member that is not registered yet."""

    def __call__(self, *, hooks: TrainerHooks) -> AbstractAsyncContextManager[TrainerMember]:
        """Return it; its channels are closed at the end."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOrders:
    """What the run asked for since the last look, to be done after the step in progress.

    Attributes:
        publish: A version.
        checkpoint_ids: Checkpoints under these ids; the ack of the step's batch carries one.
    """

    publish: bool = False
    checkpoint_ids: tuple[str, ...] = ()


class TrainerLife:
    """One registration, from `start` to `close`; used from the trainer's thread.

    Attributes:
        shelf: Where batches wait.
        meter: How busy the trainer is.
    """

    def __init__(self, loop: LoopThread, *, dial: Dial, clock: Clock) -> None:
        self.shelf = Shelf()
        self.meter = TrainerLoadMeter(clock)
        self._loop = loop
        self._dial = dial
        self._saves: SimpleQueue[str] = SimpleQueue()
        self._publish_order = Event()
        self._token_listeners: list[Callable[[bytes], None]] = []
        self._doubt_listeners: list[Callable[[int], None]] = []
        self._session_listeners: list[Callable[[Session], None]] = []
        self._registered: Future[TrainerMember] = Future()
        self._life: Future[None] = Future()
        self._leaving: asyncio.Event | None = None
        self._error: AstraflowError | None = None

    def start(self) -> None:
        """Register.

        Raises:
            AstraflowError: What the hub answered; NOT_READY when it could not be reached.
        """
        self._life = self._loop.spawn(self._live())
        self._life.add_done_callback(self._died)
        self._registered.result()

    def close(self) -> None:
        """Leave the run; idempotent."""
        if not self._registered.done():
            self._life.cancel()
        if not self._life.done():
            self._loop.call(self._leave())
        with suppress(AstraflowError, CancelledError):
            self._life.result()

    @property
    def member(self) -> TrainerMember:
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
        self._require_life(coroutine)
        return self._loop.call(coroutine)

    def spawn(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run a call on the loop beside the caller; fail at once when the session is over."""
        self._require_life(coroutine)
        return self._loop.spawn(coroutine)

    def wait(self, future: Future[Result]) -> Result:
        """Wait for what was spawned; whatever it raises is raised here."""
        return self._loop.wait(future)

    def _require_life(self, coroutine: Coroutine[Any, Any, object]) -> None:
        if self._life.done():
            coroutine.close()
            raise self._error or AstraflowError(Reason.SESSION_ENDED, "the trainer has left")

    def read(self, share: StreamBatches) -> Future[None]:
        """Fill the shelf until the data ends or the future is cancelled."""
        reading = self._loop.spawn(self._read(share))
        reading.add_done_callback(self._died)
        return reading

    def listen(self, listener: Callable[[bytes], None]) -> None:
        """Call back with the transfer token, now and when it changes."""
        self._token_listeners.append(listener)
        listener(self.member.keeper.transfer_token)

    def listen_for_sessions(self, listener: Callable[[Session], None]) -> None:
        """Call back with the session, now and when it was opened again."""
        self._session_listeners.append(listener)
        listener(self.member.keeper.session)

    def listen_for_doubts(self, listener: Callable[[int], None]) -> None:
        """Call back with the version whenever a reader could not verify one."""
        self._doubt_listeners.append(listener)

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

    async def _live(self) -> None:
        """Hold the session from the registration until `_leave`."""
        self._leaving = asyncio.Event()
        hooks = TrainerHooks(
            load=self.meter.report,
            held=lambda: Held(batch_ids=self.shelf.held),
            opened=self._reopened,
            directed=self._directed,
            entrusted=self._entrusted,
        )
        async with self._dial(hooks=hooks) as member:
            await member.keeper.open()
            self._registered.set_result(member)
            async with beside(member.keeper.run()):
                await self._leaving.wait()
            await member.keeper.end("the trainer leaves")

    async def _leave(self) -> None:
        if self._leaving is not None:
            self._leaving.set()

    async def _read(self, share: StreamBatches) -> None:
        """Fill the shelf until the data ends."""
        sink = BatchSink(
            batch=self.shelf.put,
            publish=self.order_publish,
            save=self._order_save,
            doubt=self._doubted,
        )
        stream = BatchStream(self.member.keeper, share=share, sink=sink)
        await stream.run()
        if stream.end_of_data is not None:
            self.shelf.end(stream.end_of_data)

    def order_publish(self) -> None:
        """Have a version published soon, by whoever trains or waits for a batch."""
        self._publish_order.set()
        self.shelf.nudge()

    def _order_save(self, checkpoint_id: str) -> None:
        self._saves.put(checkpoint_id)
        self.shelf.nudge()

    def _died(self, future: "Future[None]") -> None:
        """Tell the trainer's thread that the session or the stream is over."""
        if future.cancelled():
            # A reading is cancelled by who reads; a life only together with its loop.
            if future is not self._life:
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
        self.shelf.close(error)

    def _reopened(self, session: Session) -> None:
        self.shelf.keep(session.held_batch_ids)
        for listener in self._session_listeners:
            listener(session)

    def _directed(self, directive: Directive) -> None:
        if directive.kind is not DirectiveKind.CONTINUE:
            self.shelf.close()

    def _doubted(self, version: int) -> None:
        for listener in self._doubt_listeners:
            listener(version)

    def _entrusted(self, token: bytes) -> None:
        for listener in self._token_listeners:
            listener(token)
