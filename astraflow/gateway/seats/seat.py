"""One trainer of the run that speaks HTTP: its session, its batch in hand, its weights."""

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from functools import partial

import numpy as np
import structlog

from astraflow import __version__
from astraflow.client.batch_stream import BatchSink, BatchStream, ReceivedBatch
from astraflow.client.loop_thread import LoopThread
from astraflow.client.session import Held
from astraflow.client.trainer_session import AsyncTrainerClient, TrainerHooks, dial_trainer
from astraflow.core.batches import AckBatch, BatchOutcome, StreamBatches
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.members import Contract, Directive, DirectiveKind, RegisterTrainer, TrainerLoad
from astraflow.core.versions import WeightEndpoint
from astraflow.gateway.legacy.receiving import SenderCopy
from astraflow.gateway.seats.batches import BatchDesk
from astraflow.gateway.settings import GatewaySettings
from astraflow.rpc.concurrency import beside
from astraflow.storage.weight_files import read_weights
from astraflow.weights.publish.publisher import WeightPublisher
from astraflow.weights.serve.server import WeightServer

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class TrainerSeat:
    """A trainer from /ready on; used on the event loop.

    Attributes:
        policy_id: Whose trainer it is.
        desk: Its batches.
        label: Its own number of its newest version; None: none was published.
        offset: A version of the run less this is the trainer's own number.
    """

    def __init__(
        self,
        policy_id: PolicyId,
        settings: GatewaySettings,
        copy: SenderCopy,
        *,
        recovered: int | None,
        loop: LoopThread,
    ) -> None:
        """Prepare; `live` registers.

        Args:
            policy_id: Whose trainer.
            settings: Of the gateway.
            copy: Of the weights of its sender; closed at the end.
            recovered: Its number of the version that its sender has already; None: it begins with
                the recipe's model, as 0.
            loop: The running one.
        """
        self.policy_id = policy_id
        self.desk = BatchDesk()
        self.label: int | None = None
        self.offset = 0
        self._settings = settings
        self._copy = copy
        self._recovered = recovered
        self._first = recovered or 0
        self._publisher = WeightPublisher(policy_id, copy.plan.layout)
        listen = f"{settings.recipe.http.host}:0"
        self._server = WeightServer(self._publisher, listen=listen, loop=loop, tls=settings.tls)
        self._member: AsyncTrainerClient | None = None
        self._moved = asyncio.Condition()
        self._leaving = asyncio.Event()
        self._publishing = asyncio.Lock()
        self._drawing = asyncio.Lock()
        self._heard_s = 0.0

    async def live(self) -> None:
        """Hold the session from the registration until `leave`; errors close the desk."""
        try:
            async with AsyncExitStack() as stack:
                stack.push_async_callback(self._copy.close)
                await asyncio.to_thread(self._server.__enter__)
                stack.push_async_callback(
                    asyncio.to_thread, self._server.__exit__, None, None, None
                )
                await self._live(await stack.enter_async_context(self._dial()))
        except AstraflowError as error:
            log.warning("a trainer's seat is lost", policy_id=self.policy_id, why=str(error))
            self.desk.close(error)
        except Exception as error:
            log.exception("a trainer's seat failed", policy_id=self.policy_id)
            self.desk.close(AstraflowError(Reason.INTERNAL, f"the seat failed: {error!r}"))
        finally:
            self.desk.close(
                AstraflowError(Reason.SESSION_ENDED, "the trainer has left the run; POST /ready")
            )
            async with self._moved:
                self._moved.notify_all()

    async def ready(self) -> None:
        """Wait until the first version is published.

        Raises:
            AstraflowError: Why that cannot be.
        """
        await self._reach(self._first)

    def leave(self) -> None:
        """Leave the run; the batch in hand returns to it."""
        self._leaving.set()

    async def batch(self, label: int | None) -> ReceivedBatch:
        """Return the batch that follows a version.

        The one in hand comes again as long as it was not delivered, and to whoever asks for the
        same version again: its reader has vanished. Else asking for the next one settles it.

        Args:
            label: The trainer's version; waits until it is published. None: not said.

        Raises:
            AstraflowError: RUN_ENDED; what the seat was lost to.
        """
        self.heard()
        async with self._drawing:
            if label is not None:
                await self._reach(label)
            if self.desk.is_done_with(label):
                await self._settle()
            return await self.desk.take(label)

    async def notify(self, label: int) -> bool:
        """Publish a version of the trainer, and settle the batch that led to it.

        Returns:
            Whether its weights were fetched in full.

        Raises:
            AstraflowError: VERSION_NOT_NEXT; VERSION_NOT_SERVED when the sender has another
                version; what a transfer and the run raise.
        """
        self.heard()
        async with self._publishing:
            if label == self.label:
                return self._copy.is_full
            self.desk.require_open()
            if self.label is None or label != self.label + 1:
                raise AstraflowError(
                    Reason.VERSION_NOT_NEXT, f"version {label} does not follow {self.label}"
                )
            await self._copy.fetch(label)
            await self._publish(label + self.offset, self._copy.tensors())
            if self.desk.drawn_count <= label - self._first:
                await self._settle()
            await self._move_to(label)
        return self._copy.is_full

    def heard(self) -> None:
        """Note that the trainer is there."""
        self._heard_s = asyncio.get_running_loop().time()

    def _dial(self) -> AbstractAsyncContextManager[AsyncTrainerClient]:
        register = RegisterTrainer(
            policy_id=self.policy_id,
            name=f"http-trainer-{self.policy_id}",
            contract=Contract(software=f"astraflow-gateway/{__version__}"),
            groups_per_batch=self._settings.recipe.policies[
                self.policy_id
            ].trainer.groups_per_batch,
            weight_endpoints=(WeightEndpoint(rank=0, endpoint=self._server.endpoint),),
        )
        hooks = TrainerHooks(
            load=TrainerLoad,
            held=lambda: Held(batch_ids=self.desk.held),
            opened=lambda session: self.desk.keep(session.held_batch_ids),
            directed=self._directed,
            on_transfer_token=self._server.set_transfer_token,
        )
        return dial_trainer(
            self._settings.hub,
            token=self._settings.token,
            register=register,
            hooks=hooks,
            tls=self._settings.tls,
            patience_s=self._settings.recipe.hub.patience_s,
        )

    async def _live(self, member: AsyncTrainerClient) -> None:
        await member.session.open()
        self._member = member
        try:
            async with beside(member.session.run()):
                await self._publish_first(member.registration.next_version)
                async with beside(self._read(member)):
                    await self._until_left()
        finally:
            await member.session.end("the trainer leaves")

    async def _publish_first(self, next_version: int) -> None:
        """Publish what the trainer begins with, under the run's next number."""
        self.offset = next_version - self._first
        if self._recovered is None:
            directory = self._settings.models.get(self.policy_id)
            if directory is None:
                raise AstraflowError(
                    Reason.INVALID_FIELD,
                    f"the recipe has no policies.{self.policy_id}.model.path to begin with",
                )
            stored = await asyncio.to_thread(read_weights, directory)
            tensors = {name: each.bits for name, each in stored.items()}
            await self._publish(next_version, tensors)
        else:
            await self._copy.fetch(self._recovered)
            older = next_version - 1 if next_version else None
            await self._publish(next_version, self._copy.tensors(), restored_from=older)
        await self._move_to(self._first)

    async def _read(self, member: AsyncTrainerClient) -> None:
        """Fill the desk; wait for the end of the seat when the data ends before."""
        sink = BatchSink(
            batch=self.desk.put, publish=lambda: None, save=lambda _: None, doubt=lambda _: None
        )
        stream = BatchStream(member.session, share=StreamBatches(), sink=sink)
        await stream.run()
        if stream.end_of_data is not None:
            self.desk.end(stream.end_of_data)
            self._leave_after_the_last()

    async def _until_left(self) -> None:
        """Wait until it leaves, or says nothing for too long."""
        self.heard()
        clock, silence_s = asyncio.get_running_loop().time, self._settings.recipe.http.silence_s
        while not self._leaving.is_set():
            left_s = self._heard_s + silence_s - clock()
            if left_s <= 0:
                log.warning("a trainer says nothing; what it held returns to the run")
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), left_s)

    async def _reach(self, label: int) -> None:
        """Wait until a version is published."""

        def is_reached() -> bool:
            return self.desk.is_closed or (self.label is not None and self.label >= label)

        async with self._moved:
            await self._moved.wait_for(is_reached)
        if self.label is None or self.label < label:
            self.desk.require_open()

    async def _move_to(self, label: int) -> None:
        self.label = label
        async with self._moved:
            self._moved.notify_all()

    async def _publish(
        self, version: int, tensors: Mapping[str, np.ndarray], *, restored_from: int | None = None
    ) -> None:
        """Encode a version and tell the run; tensors are bits."""
        publish = partial(self._publisher.publish, step=version, restored_from=restored_from)
        info = await asyncio.to_thread(publish, version, tensors)
        if self._member is not None:
            await self._member.publish(info)

    async def _settle(self) -> None:
        """Tell the run that the batch in hand was trained on."""
        batch = self.desk.in_hand
        if batch is None or self._member is None:
            return
        ack = AckBatch(
            batch_id=batch.header.batch_id,
            outcome=BatchOutcome.CONSUMED,
            step=self._first + self.desk.drawn_count,
        )
        await self._member.acknowledge(ack)
        self.desk.settle()
        self._leave_after_the_last()

    def _leave_after_the_last(self) -> None:
        if self.desk.is_over:
            self._leaving.set()

    def _directed(self, directive: Directive) -> None:
        if directive.kind is not DirectiveKind.CONTINUE:
            log.info("the run asks a trainer to leave", why=directive.message)
            self._leaving.set()
