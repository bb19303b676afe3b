"""The origin of a policy's weights: every version is encoded, served and announced."""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any

import structlog

from astraflow.client.trainer import TrainerClient
from astraflow.config.recipe import TrainerConfig
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tensors import Dtype, Layout
from astraflow.core.versions import VersionInfo, WeightEndpoint
from astraflow.rpc.address import split_address
from astraflow.trainers.engine import TrainEngine, WarnsOfChange
from astraflow.weights.patches.routes import steps
from astraflow.weights.publish.background import ExtraPatches, Scrub
from astraflow.weights.publish.object_store import ObjectWriter
from astraflow.weights.publish.publisher import WeightPublisher
from astraflow.weights.publish.tensors import can_round, dtype_of


def published_layout(parameters: Iterable[tuple[str, Any]], dtype: Dtype) -> Layout:
    """Return where tensors, as `TrainEngine.named_parameters` yields them, lie once exported.

    The floats of torch are rounded to a type; other arrays keep theirs.

    Raises:
        AstraflowError: LAYOUT_MISMATCH for an array of a type that cannot be published.
    """

    def published(name: str, array: Any) -> Dtype:
        if can_round(array, dtype):
            return dtype
        own = dtype_of(array)
        if own is None:
            raise AstraflowError(
                Reason.LAYOUT_MISMATCH,
                f"tensor {name} is {array.dtype}, which cannot be published; give float32 or "
                "bfloat16",
            )
        return own

    return Layout.of((name, published(name, each), tuple(each.shape)) for name, each in parameters)


Wake = Callable[[], None]
"""Told that a newer version was announced; returns at once, on any thread."""


@dataclass(slots=True, kw_only=True, eq=False)
class Publication:
    """One version that is published.

    Attributes:
        made: What the run is told, once it is encoded.
        whole_nbytes: Of the exported weights.
        encode_s: Seconds to encode it, once that is done.
        held_s: Seconds for which training stood still for it, so far.
    """

    version: int
    made: Future[VersionInfo]
    whole_nbytes: int
    encode_s: float = 0.0
    held_s: float = 0.0

    def hold(self) -> None:
        """Wait until it is encoded, or could not be."""
        if not self.made.done():
            started = monotonic()
            wait([self.made])
            self.held_s += monotonic() - started

    @property
    def metrics(self) -> Mapping[str, float]:
        """Numbers for the log: what a reader of the version before pulls, of what all takes.

        They are there once the version is announced.
        """
        ways = steps(self.made.result().patches)
        nbytes = min((sum(each.payload_nbytes for each in way) for way in ways), default=0)
        return {
            "weights/version": float(self.version),
            "weights/bytes": float(nbytes),
            "weights/density": nbytes / max(1, self.whole_nbytes),
            "time/publish_s": self.encode_s,
        }


class WeightOrigin:
    """Publishes the weights of a model, one version after the other.

    The publisher reads them range by range, and rounds f32 master weights on the way, while it
    compares them with the version before: there is no exported copy of the model. It does so on a
    thread of its own. An engine that calls `hold` before its weights change computes meanwhile; for
    any other `publish` returns when they were read.
    """

    def __init__(
        self,
        engine: TrainEngine,
        *,
        layout: Layout,
        publishing: "Publishing",
        herald: TrainerClient,
        first_version: int,
        followers: Sequence[Wake] = (),
        restored_from: int | None = None,
    ) -> None:
        """Publish nothing yet; the present weights were published as `restored_from` before."""
        self._engine = engine
        self._whole_nbytes = sum(spec.nbytes for spec in layout.tensors)
        self._publishing = publishing
        self._herald = herald
        self._next_version = first_version
        self._followers = followers
        self._restored_from = restored_from
        self._encoder = ThreadPoolExecutor(1, "publish")
        self._last: Publication | None = None
        self._goes_on = isinstance(engine, WarnsOfChange)
        if isinstance(engine, WarnsOfChange):
            engine.before_change(self.hold)

    @property
    def is_damaged(self) -> bool:
        """Whether the last version cannot be had any more: its weights are to be published anew."""
        return self._publishing.is_damaged

    def publish(self, *, step: int) -> Publication:
        """Make the present weights the next version; the run is told of it while training goes on.

        What the publisher answers, such as VERSION_NOT_NEXT, the herald is told; unless training
        goes on meanwhile, it is raised here too.

        Raises:
            AstraflowError: See above.
        """
        self.hold()
        version, self._next_version = self._next_version, self._next_version + 1
        restored_from, self._restored_from = self._restored_from, None
        self._publishing.order(version, step, restored_from)
        made = self._encoder.submit(
            self._publishing.publish,
            version,
            dict(self._engine.named_parameters()),
            step=step,
            restored_from=restored_from,
        )
        last = Publication(version=version, made=made, whole_nbytes=self._whole_nbytes)
        self._last, started = last, monotonic()

        def note(_: Future[VersionInfo]) -> None:
            last.encode_s = monotonic() - started

        made.add_done_callback(note)
        self._herald.announce(made, then=self._wake)
        if not self._goes_on:
            self.hold()
            made.result()
        return last

    def hold(self) -> None:
        """Wait until the weights of the last version were read: they may change then."""
        if self._last is not None:
            self._last.hold()

    def _wake(self) -> None:
        for wake in self._followers:
            wake()


class Publishing:
    """Encodes versions and serves them, all in this process.

    Attributes:
        own: Of what this process serves.
        rank_count: Ranks that share every batch.
    """

    def __init__(self, own: WeightPublisher, *, rank_count: int = 1) -> None:
        self.own = own
        self.rank_count = rank_count

    @property
    def is_damaged(self) -> bool:
        return self.own.is_damaged

    def order(self, version: int, step: int, restored_from: int | None) -> None:
        """Have other ranks encode a version of their present weights; `publish` does so here.

        It is called before, on the thread that trains.
        """

    def publish(
        self,
        version: int,
        tensors: Mapping[str, Any],
        *,
        step: int,
        restored_from: int | None = None,
    ) -> VersionInfo:
        return self.own.publish(version, tensors, step=step, restored_from=restored_from)

    def endpoints(self, own: str) -> tuple[WeightEndpoint, ...]:
        """Return where versions are served; this process does at `own`."""
        return (WeightEndpoint(rank=0, endpoint=own),)

    def entered(self, client: TrainerClient) -> None:
        """Note that the trainer has its place in the run."""
        self.own.sign_with(client.registration.signing_seed)


log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


@contextmanager
def version_listeners(
    publisher: WeightPublisher,
    client: TrainerClient,
    settings: TrainerConfig,
    *,
    scrub: Scrub,
    listen: str,
) -> Generator[tuple[Wake, ...]]:
    """Let versions gain patches beside training, and go other ways too."""
    with ExitStack() as followers:
        others: tuple[Wake, ...] = (scrub.wake,)
        group = settings.broadcast
        if group is not None:
            from astraflow.weights.broadcast import Broadcaster  # noqa: PLC0415 - loads torch

            broadcaster = Broadcaster(publisher, group, host=split_address(listen)[0])
            others = (followers.enter_context(broadcaster).wake, *others)
        look = None
        url = store_url(settings, client.registration.run_id)
        if url is not None:
            writer = followers.enter_context(ObjectWriter(publisher, url, client.publish_version))
            log.info("versions also go to an object store", url=url)
            others, look = (*others, writer.wake), writer.note_patches
        if publisher.history.shard_layout.shard.count == 1:
            # Of shards a patch is of use once all ranks have it: none speaks for the others.
            gains = ExtraPatches(publisher, client.publish_version, then=look)
            others = (*others, followers.enter_context(gains).wake)
        yield others


def store_url(settings: TrainerConfig, run_id: str) -> str | None:
    """Return the folder of a run in the object store of a trainer; None: it has none."""
    return None if settings.store is None else f"{settings.store.rstrip('/')}/{run_id}"
