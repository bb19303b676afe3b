"""Rank 0 of a trainer: what it does, all other ranks do with it."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from astraflow.client.trainer import TrainerBatch, TrainerClient
from astraflow.core.ids import PolicyId
from astraflow.core.tensors import Layout
from astraflow.core.versions import VersionInfo, WeightEndpoint
from astraflow.trainers.fsdp.engine import ShardedEngine
from astraflow.trainers.fsdp.orders import (
    AtVersion,
    Join,
    Leave,
    Prepare,
    PublishVersion,
    Restore,
    Save,
    SecretsBoard,
    Serve,
    TrainStep,
)
from astraflow.trainers.fsdp.ranks import Ranks, together
from astraflow.trainers.fsdp.weights import publish_shard, published_rows, shard_publisher
from astraflow.weights.publish.publisher import WeightPublisher


class LeadEngine:
    """A `TrainEngine` whose every call is made on all ranks."""

    def __init__(self, engine: ShardedEngine, ranks: Ranks) -> None:
        """Lead the ranks that `follow`.

        Args:
            engine: Of this rank, 0.
            ranks: All of them.
        """
        self._engine = engine
        self._ranks = ranks
        self._publishers = ranks.beside()

    @property
    def step_count(self) -> int:
        """Optimizer steps behind the present weights."""
        return self._engine.step_count

    @property
    def replays_experts(self) -> bool:
        """Whether tokens take the sampler's experts."""
        return self._engine.replays_experts

    def prepare(self) -> None:
        """Load the first weights."""
        self._ranks.broadcast(Prepare())
        self._engine.prepare()

    def train_step(self, batch: TrainerBatch) -> Mapping[str, float]:
        """Make a step on all ranks' shares of a batch; the metrics are those of all.

        Raises:
            AstraflowError: What makes all ranks refuse the batch; weights are what they were.
            RanksApartError: What ends the trainer.
        """
        with together():
            self._ranks.broadcast(TrainStep(batch.header.batch_id))
            self._ranks.agree(None)
            return self._engine.train_step(batch)

    def at_version(self, version: int) -> None:
        """Note what the present weights are published as."""
        self._ranks.broadcast(AtVersion(version))
        self._engine.at_version(version)

    def before_change(self, call: Callable[[], None]) -> None:
        """Call back in every step just before the weights of this rank change."""
        self._engine.before_change(call)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the master weights, f32 DTensors."""
        return self._engine.named_parameters()

    def save(self, directory: Path) -> None:
        """Begin to write a checkpoint, each rank its rows."""
        self._ranks.broadcast(Save(directory.absolute()))
        self._engine.save(directory)

    def wait_for_save(self) -> None:
        """Wait until all ranks have written theirs, which they do without an order."""
        self._engine.wait_for_save()

    def restore(self, directory: Path) -> None:
        """Go on from a checkpoint, whatever the number of ranks that wrote it."""
        self._ranks.broadcast(Restore(directory.absolute()))
        self._engine.restore(directory)

    def publishing(self, policy_id: PolicyId, layout: Layout) -> "LeadPublishing":
        """Return what publishes and serves the rows of all ranks."""
        own = shard_publisher(policy_id, layout, self._ranks)
        return LeadPublishing(own, self._engine, self._ranks, publishers=self._publishers)

    def leave(self) -> None:
        """Let all ranks end."""
        self._ranks.broadcast(Leave())


class LeadPublishing:
    """Publishes versions of which every rank has its rows; rank 0 announces them.

    Attributes:
        own: Publisher of rank 0's rows.
    """

    def __init__(
        self, own: WeightPublisher, engine: ShardedEngine, ranks: Ranks, *, publishers: Ranks
    ) -> None:
        """Publish nothing yet.

        Args:
            own: Publisher of rank 0's rows.
            engine: Of rank 0.
            ranks: That are told on the thread that trains.
            publishers: The same, on the threads that encode.
        """
        self.own = own
        self._engine = engine
        self._rows: Mapping[str, Tensor] = {}
        self._ranks = ranks
        self._publishers = publishers
        self._board = SecretsBoard()

    @property
    def rank_count(self) -> int:
        """Ranks that share every batch."""
        return self._ranks.data_count

    @property
    def is_damaged(self) -> bool:
        """Whether rank 0's copy is not what it should be; all others come whole with it."""
        return self.own.is_damaged

    def order(self, version: int, step: int, restored_from: int | None) -> None:
        """Have the other ranks encode their rows, beside their steps as here."""
        self._ranks.broadcast(PublishVersion(version, step, restored_from))
        self._rows = published_rows(self._engine.named_parameters(), self._ranks)

    def publish(
        self,
        version: int,
        tensors: Mapping[str, Any],
        *,
        step: int,
        restored_from: int | None = None,
    ) -> VersionInfo:
        """Make a version that was ordered ready to be pulled from all ranks."""
        del tensors
        rows, self._rows = self._rows, {}
        order = PublishVersion(version, step, restored_from)
        return publish_shard(self.own, rows, order, self._publishers)

    def endpoints(self, own: str) -> tuple[WeightEndpoint, ...]:
        """Return where all ranks serve their rows.

        Args:
            own: Where rank 0 does.
        """
        self._ranks.broadcast(Serve())
        said = self._ranks.all_gather_object((self._ranks.publishes, self._ranks.shard_rank, own))
        return tuple(
            WeightEndpoint(rank=rank, endpoint=endpoint)
            for publishes, rank, endpoint in said
            if publishes
        )

    def entered(self, client: TrainerClient) -> None:
        """Let all ranks in with the session of rank 0, now and whenever it is another one."""
        client.on_session(lambda session: self._board.set_session(session.token))
        client.on_transfer_token(self._board.set_transfer)
        registration = client.registration
        self.own.sign_with(registration.signing_seed)
        self._ranks.broadcast(
            Join(
                self._board.host,
                self._board.port,
                registration.run_id,
                registration.signing_seed,
            )
        )
