"""One trainer of the run that speaks HTTP: its session, its batch in hand, its weights.

As published, rows are padded on the right, [batch, seq], one tensor per column. Token columns:
input_ids i32, loss_mask i32, logprobs f32, versions i32 (-1 where not sampled), attention_mask
bool; 0 behind the end of a row. Row columns, [batch]: rewards f32, group_reward_mean f32,
group_reward_std f32 (of the sample, 1 for a group of one), group_id i64. Lists: prompt_id.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    aclosing,
    contextmanager,
    suppress,
)
from functools import partial
from typing import Any, Final

import numpy as np
import structlog
from blake3 import blake3

from astraflow import __version__
from astraflow.client.batch_stream import TrainerBatch, batch_items
from astraflow.client.loop_thread import LoopThread
from astraflow.client.session import Held, MemberHooks
from astraflow.client.trainer_session import AsyncTrainerClient, dial_trainer
from astraflow.core.batches import AckBatch, BatchOutcome, BatchPart, EndOfData, StreamBatches
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import BatchId, PolicyId
from astraflow.core.members import Contract, Directive, DirectiveKind, RegisterTrainer, TrainerLoad
from astraflow.core.versions import VersionInfo, WeightEndpoint
from astraflow.gateway.receiving import SenderCopy
from astraflow.gateway.settings import GatewaySettings
from astraflow.rpc.concurrency import beside
from astraflow.storage.weight_files import read_weights
from astraflow.weights.publish.publisher import WeightPublisher
from astraflow.weights.serve.server import WeightServer

# Published name, name here, element type.
_TOKEN_COLUMNS = (
    ("input_ids", "tokens", np.int32),
    ("loss_mask", "loss_mask", np.int32),
    ("logprobs", "logprobs", np.float32),
    ("versions", "versions", np.int32),
)


class TrainerBatches:
    """Hands out one batch until it is settled: to whoever asks again, the same one.

    Attributes:
        drawn_count: Batches handed out, each counted once.
        is_delivered: Whether all of the batch in hand was written to its reader.
    """

    def __init__(self) -> None:
        self.in_hand: TrainerBatch | None = None
        self.drawn_count = 0
        self.is_delivered = False
        self._drawn_for: int | None = None
        self._waiting: OrderedDict[BatchId, TrainerBatch] = OrderedDict()
        # A copy may come while the ack of a batch is on its way.
        self._finished: deque[BatchId] = deque(maxlen=64)
        self._end: EndOfData | None = None
        self._error: AstraflowError | None = None
        self._news = asyncio.Event()

    @property
    def held(self) -> tuple[BatchId, ...]:
        """Batches that are in hand or wait."""
        in_hand = () if self.in_hand is None else (self.in_hand.header.batch_id,)
        return (*in_hand, *self._waiting)

    def put(self, batch: TrainerBatch) -> None:
        """Take a batch of the stream, unless it is or was here."""
        batch_id = batch.header.batch_id
        if batch_id not in self.held and batch_id not in self._finished:
            self._waiting[batch_id] = batch
            self._news.set()

    def keep(self, batch_ids: tuple[BatchId, ...]) -> None:
        """Drop what is no longer leased to this trainer."""
        for batch_id in self._waiting.keys() - set(batch_ids):
            del self._waiting[batch_id]

    def end(self, end_of_data: EndOfData) -> None:
        """Note that nothing follows what waits."""
        self._end = end_of_data
        self._news.set()

    def close(self, error: AstraflowError) -> None:
        """Hand out nothing more."""
        self._error = self._error or error
        self._news.set()

    @property
    def is_closed(self) -> bool:
        return self._error is not None

    def is_done_with(self, label: int | None) -> bool:
        """Whether asking for the batch after a version says that the one in hand was used."""
        if self.in_hand is None or not self.is_delivered:
            return False
        return label is None or label != self._drawn_for

    def require_open(self) -> None:
        """Raise what it was closed with."""
        if self._error is not None:
            raise self._error

    async def take(self, label: int | None) -> TrainerBatch:
        """Return the batch in hand, or wait for the one after version `label`; None: not said."""
        while self.in_hand is None:
            if self._waiting and not self.is_closed:
                self.in_hand = self._waiting.popitem(last=False)[1]
                self._drawn_for, self.is_delivered = label, False
                self.drawn_count += 1
            elif self._end is not None:
                raise AstraflowError(
                    Reason.RUN_ENDED,
                    f"no batch follows: {self._end.cause} after {self._end.batch_count} batches",
                )
            else:
                self.require_open()
                self._news.clear()
                await self._news.wait()
        return self.in_hand

    def finish(self) -> None:
        """Forget the batch in hand."""
        if self.in_hand is not None:
            self._finished.append(self.in_hand.header.batch_id)
            self.in_hand = None


def padded(batch: TrainerBatch, *, version_offset: int = 0) -> dict[str, Any]:
    """Return the columns of a whole batch.

    Args:
        batch: All of its rows on one rank.
        version_offset: What the trainer counts from: a version of the run less this is its own.
    """
    parts = batch.parts
    lengths = np.concatenate([np.diff(part.row_offsets) for part in parts] or [np.zeros(0, int)])
    inside: np.ndarray = np.arange(int(lengths.max(initial=0))) < lengths[:, None]
    columns: dict[str, Any] = {}
    for name, ours, dtype in _TOKEN_COLUMNS:
        column = np.zeros(inside.shape, dtype)
        column[inside] = _joined(parts, ours)
        columns[name] = column
    if version_offset:
        versions: np.ndarray = columns["versions"]
        is_numbered = inside & (versions >= 0)
        own = np.maximum(versions - version_offset, 0)
        columns["versions"] = np.where(is_numbered, own, versions).astype(np.int32)
    columns["attention_mask"] = inside
    return columns | _rows(batch)


def _joined(parts: Sequence[BatchPart], name: str) -> np.ndarray:
    values = [part.values(name) for part in parts]
    return values[0] if len(values) == 1 else np.concatenate(values or [np.zeros(0)])


def _rows(batch: TrainerBatch) -> dict[str, Any]:
    parts, groups = batch.parts, batch.header.groups
    index = _joined(parts, "group_index").astype(np.int64)
    numbers = np.array([_number(group.group_id) for group in groups], np.int64)
    return {
        "rewards": _joined(parts, "rewards").astype(np.float32),
        "group_reward_mean": _joined(parts, "group_reward_mean").astype(np.float32),
        "group_reward_std": _sample_std(parts, index),
        "group_id": numbers[index],
        "prompt_id": [groups[int(at)].prompt_id for at in index],
    }


def _sample_std(parts: Sequence[BatchPart], index: np.ndarray) -> np.ndarray:
    """Return the deviation of a sample: ours is of the population, over n instead of n - 1."""
    population = _joined(parts, "group_reward_std").astype(np.float64)
    rewarded = np.isfinite(_joined(parts, "rewards"))
    ids = [each for part in parts for each in part.rollout_ids]
    rollouts = {
        pair
        for pair, has in zip(zip(index.tolist(), ids, strict=True), rewarded, strict=True)
        if has
    }
    counts = np.bincount([group for group, _ in rollouts], minlength=int(index.max(initial=-1)) + 1)
    n = counts[index]
    std = population * np.sqrt(n / np.maximum(n - 1, 1))
    return np.where(n > 1, std, 1.0).astype(np.float32)


def _number(group_id: str) -> int:
    """Return a number that stays a group's own over batches: 63 bits of its id."""
    digits = group_id.rpartition("-")[2]
    if digits.isdecimal() and len(digits) < 18:
        return int(digits)
    return int.from_bytes(blake3(group_id.encode()).digest(8), "little") >> 1


log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_LOST: Final = frozenset({Reason.LEASE_LOST, Reason.BATCH_UNKNOWN})


class BridgedTrainer:
    """A trainer from /ready on; used on the event loop.

    Attributes:
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
        """Hold no session; `live` registers. Without `recovered` the recipe's model begins."""
        self.policy_id = policy_id
        self.batches = TrainerBatches()
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
        # What the run knows, or is about to be told of.
        self._encoded: VersionInfo | None = None
        self._request_count = 0
        self._heard_s = 0.0

    async def live(self) -> None:
        """Hold the session from the registration until `leave`; errors close its batches."""
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
            self.batches.close(error)
        except Exception as error:
            log.exception("a trainer's seat failed", policy_id=self.policy_id)
            self.batches.close(AstraflowError(Reason.INTERNAL, f"the seat failed: {error!r}"))
        finally:
            self.batches.close(
                AstraflowError(Reason.SESSION_ENDED, "the trainer has left the run; POST /ready")
            )
            async with self._moved:
                self._moved.notify_all()

    async def ready(self) -> None:
        """Wait until the first version is published."""
        await self._wait_published(self._first)

    def leave(self) -> None:
        """Leave the run; the batch in hand returns to it."""
        self._leaving.set()

    async def batch(self, label: int | None) -> TrainerBatch:
        """Return the batch that follows a version, once that is published; None: not said.

        The one in hand comes again as long as it was not delivered, and to whoever asks for the
        same version again: its reader has vanished. Else asking for the next one settles it.

        Raises:
            AstraflowError: RUN_ENDED; what ended it.
        """
        async with self._drawing:
            if label is not None:
                await self._wait_published(label)
            if self.batches.is_done_with(label):
                await self._acknowledge()
            return await self.batches.take(label)

    async def notify(self, label: int) -> bool:
        """Publish a version, and settle the batch that led to it; return whether it came in full.

        One that failed may be asked for again: what was done of it is not done twice.

        Raises:
            AstraflowError: VERSION_NOT_NEXT; VERSION_NOT_SERVED when the sender has another
                version; what a transfer and the run raise.
        """
        async with self._publishing:
            if label == self.label:
                return self._copy.is_full
            self.batches.require_open()
            if self.label is None or label != self.label + 1:
                raise AstraflowError(
                    Reason.VERSION_NOT_NEXT, f"version {label} does not follow {self.label}"
                )
            version = label + self.offset
            if self._encoded is None or self._encoded.version != version:
                await self._copy.fetch(label)
                await self._encode(version, self._copy.tensors())
            await self._announce()
            if self.batches.drawn_count <= label - self._first:
                await self._acknowledge()
            await self._move_to(label)
        return self._copy.is_full

    @contextmanager
    def asking(self) -> Generator[None]:
        """Count a request as a sign of life, for as long as it lasts."""
        self._request_count += 1
        try:
            yield
        finally:
            self._request_count -= 1
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
        hooks = MemberHooks(
            load=TrainerLoad,
            held=lambda: Held(batch_ids=self.batches.held),
            opened=lambda session: self.batches.keep(session.held_batch_ids),
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
                self._publisher.sign_with(member.registration.signing_seed)
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
            await self._encode(next_version, tensors)
        else:
            await self._copy.fetch(self._recovered)
            older = next_version - 1 if next_version else None
            await self._encode(next_version, self._copy.tensors(), restored_from=older)
        await self._announce()
        await self._move_to(self._first)

    async def _read(self, member: AsyncTrainerClient) -> None:
        """Take batches from the run."""
        async with aclosing(batch_items(member.session, StreamBatches())) as items:
            async for item in items:
                if isinstance(item, TrainerBatch) and item.error is not None:
                    await member.return_unreadable(item.header.batch_id, item.error)
                elif isinstance(item, TrainerBatch):
                    self.batches.put(item)
                elif isinstance(item, EndOfData):
                    # Its weights are served until the run asks it to leave.
                    self.batches.end(item)

    async def _until_left(self) -> None:
        """Wait until it leaves, or says nothing for too long."""
        clock, silence_s = asyncio.get_running_loop().time, self._settings.recipe.http.silence_s
        self._heard_s = clock()
        while not self._leaving.is_set():
            heard_s = clock() if self._request_count else self._heard_s
            left_s = heard_s + silence_s - clock()
            if left_s <= 0:
                log.warning("a trainer says nothing; what it held returns to the run")
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), left_s)

    async def _wait_published(self, label: int) -> None:
        """Wait until a version is published."""

        def is_reached() -> bool:
            return self.batches.is_closed or (self.label is not None and self.label >= label)

        async with self._moved:
            await self._moved.wait_for(is_reached)
        if self.label is None or self.label < label:
            self.batches.require_open()

    async def _move_to(self, label: int) -> None:
        self.label = label
        async with self._moved:
            self._moved.notify_all()

    async def _encode(
        self, version: int, tensors: Mapping[str, np.ndarray], *, restored_from: int | None = None
    ) -> None:
        """Make a version ready to be pulled; tensors are bits."""
        publish = partial(self._publisher.publish, step=version, restored_from=restored_from)
        self._encoded = await asyncio.to_thread(publish, version, tensors)

    async def _announce(self) -> None:
        """Tell the run of what was encoded last."""
        if self._member is not None and self._encoded is not None:
            await self._member.publish(self._encoded)

    async def _acknowledge(self) -> None:
        """Tell the run that the batch in hand was trained on; one that is lost is let go of."""
        batch = self.batches.in_hand
        if batch is None or self._member is None:
            return
        ack = AckBatch(
            batch_id=batch.header.batch_id,
            outcome=BatchOutcome.CONSUMED,
            step=self._first + self.batches.drawn_count,
        )
        try:
            await self._member.acknowledge(ack)
        except AstraflowError as error:
            if error.reason not in _LOST:
                raise
            log.warning("a batch was trained on that is another's now", why=error.message)
        self.batches.finish()

    def _directed(self, directive: Directive) -> None:
        if directive.kind is not DirectiveKind.CONTINUE:
            log.info("the run asks a trainer to leave", why=directive.message)
            self._leaving.set()
