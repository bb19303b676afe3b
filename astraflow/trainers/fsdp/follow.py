"""Every rank but the first: does what rank 0 orders, on its own rows."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from threading import Event, Thread
from typing import Literal, Self, cast

import structlog
from torch._C._distributed_c10d import TCPStore

from astraflow.client.loop_thread import LoopThread
from astraflow.client.rank import RankClient
from astraflow.config.recipe import TrainerConfig
from astraflow.core.batches import StreamBatches
from astraflow.core.errors import AstraflowError
from astraflow.core.ids import BatchId, PolicyId
from astraflow.core.tensors import Dtype
from astraflow.core.versions import VersionInfo
from astraflow.trainers.fsdp.engine import ShardedEngine
from astraflow.trainers.fsdp.ranks import Ranks, together
from astraflow.trainers.fsdp.weights import publish_shard, published_rows, shard_publisher
from astraflow.trainers.joining import TrainerPlace, weight_server
from astraflow.trainers.origin import Wake, published_layout, store_url
from astraflow.trainers.peers import agreeing
from astraflow.weights.publish.background import Scrub
from astraflow.weights.publish.object_store import ObjectWriter
from astraflow.weights.publish.publisher import WeightPublisher
from astraflow.weights.serve.server import WeightServer

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

SESSION, TRANSFER = "session", "transfer"
"""What the store of rank 0 calls the tokens of the trainer's session, and of transfers."""

Order = Literal[
    "prepare", "serve", "join", "at_version", "train_step", "publish", "save", "restore"
]
"""What rank 0 may have another rank do; with the arguments of that, or None: leave."""

_LOOK_S = 1.0


class TokenReader:
    """Looks for rank 0's tokens once a second, in a thread of its own, until it is closed."""

    def __init__(
        self, host: str, port: int, *, changed: Callable[[Mapping[str, bytes]], None]
    ) -> None:
        """Read nothing from rank 0's store before `with`.

        `changed` gets the tokens at first, and on another thread whenever they are others.
        """
        self._store = TCPStore(host, port, is_master=False)
        self._changed = changed
        self._over = Event()
        self._last: Mapping[str, bytes] = {}
        self._thread = Thread(target=self._follow, name="astraflow-tokens", daemon=True)

    def __enter__(self) -> Self:
        self._poll()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _follow(self) -> None:
        try:
            while not self._over.wait(_LOOK_S):
                self._poll()
        except RuntimeError as error:
            # Rank 0 is gone: the next collective says so.
            log.info("no more tokens come from rank 0", why=str(error))

    def _poll(self) -> None:
        names = (SESSION, TRANSFER)
        found = {name: bytes.fromhex(self._store.get(name).decode()) for name in names}
        if found != self._last:
            self._last = found
            self._changed(found)


class FollowerRank:
    """One rank after the first: makes the calls that rank 0 names."""

    def __init__(
        self,
        engine: ShardedEngine,
        ranks: Ranks,
        policy_id: PolicyId,
        *,
        settings: TrainerConfig,
        place: TrainerPlace,
        loop: LoopThread,
    ) -> None:
        self._engine = engine
        self._ranks = ranks
        self._policy_id = policy_id
        self._settings = settings
        self._place = place
        self._loop = loop
        self._parts = ExitStack()
        self._publishers = ranks.beside()
        self._encoder = ThreadPoolExecutor(1, "publish")
        self._made: Future[VersionInfo] | None = None
        engine.before_change(self._hold)
        self._publisher: WeightPublisher | None = None
        self._server: WeightServer | None = None
        self._followers: list[Wake] = []
        self._batches: RankClient | None = None
        self._calls: Mapping[Order, Callable[..., object]] = {
            "prepare": engine.prepare,
            "serve": self._serve,
            "join": self._join,
            "at_version": engine.at_version,
            "train_step": self._step,
            "publish": self._publish,
            "save": engine.save,
            "restore": engine.restore,
        }

    def run(self) -> None:
        """Do what rank 0 orders until it says that there is nothing more.

        Raises:
            AstraflowError: MEMBER_LOST when a rank is gone.
            RanksApartError: What happened to one rank alone, in a step.
        """
        with self._parts, self._encoder:
            while (order := self._ranks.broadcast()) is not None:
                name, *arguments = order
                self._calls[name](*arguments)
            self._engine.wait_for_save()
        log.info("the rank leaves", rank=self._ranks.rank, step=self._engine.step_count)

    def _serve(self) -> None:
        """Serve this rank's rows; those that were served before are not any more."""
        self._parts.close()
        self._batches = None
        dtype = Dtype(self._settings.export_dtype)
        layout = published_layout(self._engine.named_parameters(), dtype)
        self._publisher = shard_publisher(self._policy_id, layout, self._ranks)
        self._publisher.copies_on_device = self._settings.copy_on_device
        self._server = self._parts.enter_context(
            weight_server(self._publisher, self._settings, self._place, self._loop)
        )
        # What it finds is told when the next version is published.
        scrub = self._parts.enter_context(Scrub(self._publisher, damaged=lambda: None))
        self._followers = [scrub.wake]
        self._ranks.all_gather_object(
            (self._ranks.publishes, self._ranks.shard_rank, self._server.endpoint)
        )

    def _join(self, place: tuple[str, int], run_id: str, signing_seed: bytes) -> None:
        """Read this rank's share of the batches; its versions may go to an object store, too.

        Rank 0's tokens are at `place`, a host and a port.
        """
        publisher = cast("WeightPublisher", self._publisher)
        publisher.sign_with(signing_seed)
        url = store_url(self._settings, run_id)
        if url is not None and self._ranks.publishes:
            # Rank 0 tells the run of what all have written.
            writer = self._parts.enter_context(ObjectWriter(publisher, url, None))
            self._followers.append(writer.wake)
        self._parts.enter_context(TokenReader(*place, changed=self._set_tokens))

    def _set_tokens(self, tokens: Mapping[str, bytes]) -> None:
        if self._server is not None:
            self._server.set_transfer_token(tokens[TRANSFER])
        if not self._ranks.reads_batches:
            return
        if self._batches is None:
            self._batches = self._parts.enter_context(self._client(tokens[SESSION]))
        else:
            self._batches.renew(tokens[SESSION])

    def _client(self, session_token: bytes) -> RankClient:
        share = StreamBatches(
            rank=self._ranks.data_rank,
            world_size=self._ranks.data_count,
            max_tokens=self._settings.max_tokens_per_pass,
            max_outstanding=self._settings.prefetch,
        )
        return RankClient(
            hub=self._place.hub,
            loop=self._loop,
            session_token=session_token,
            share=share,
            tls=self._place.tls,
            patience_s=self._place.patience_s,
        )

    def _step(self, batch_id: BatchId) -> None:
        """Make a step; where all ranks refuse the batch, rank 0 decides what becomes of it."""
        batches = self._batches
        try:
            with together():
                with agreeing(self._ranks):
                    batch = None if batches is None else batches.take(batch_id)
                self._engine.train_step(batch)
        except AstraflowError as error:
            log.warning("a step failed", batch_id=batch_id, why=error.message)
        if batches is not None:
            batches.release(batch_id)

    def _publish(self, version: int, step: int, restored_from: int | None) -> None:
        """Encode this rank's rows beside the steps that follow, which wait to change them."""
        self._hold()
        tensors = published_rows(self._engine.named_parameters(), self._ranks)
        self._made = self._encoder.submit(
            publish_shard,
            cast("WeightPublisher", self._publisher),
            tensors,
            self._publishers,
            version=version,
            step=step,
            restored_from=restored_from,
        )

        def wake(_: Future[VersionInfo]) -> None:
            for follower in self._followers:
                follower()

        self._made.add_done_callback(wake)

    def _hold(self) -> None:
        """Wait until the rows of the last version were read; of what failed rank 0 hears, too."""
        if self._made is not None:
            wait([self._made])
