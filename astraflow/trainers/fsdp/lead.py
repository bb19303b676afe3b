"""Rank 0 of a trainer: what it does, all other ranks do with it.

What they are to do it says as the name of a call with its arguments, see `FollowerRank`.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from astraflow.client.trainer import TrainerBatch, TrainerClient
from astraflow.core.ids import PolicyId
from astraflow.core.tensors import Layout
from astraflow.core.versions import VersionInfo, WeightEndpoint
from astraflow.trainers.fsdp.engine import ShardedEngine
from astraflow.trainers.fsdp.follow import SESSION, TRANSFER, Order
from astraflow.trainers.fsdp.ranks import Ranks, together
from astraflow.trainers.fsdp.weights import publish_shard, published_rows, shard_publisher
from astraflow.trainers.origin import Publishing
from astraflow.weights.publish.publisher import WeightPublisher


def _order(ranks: Ranks, name: Order, *arguments: object) -> None:
    """Have the ranks that follow make a call."""
    ranks.broadcast((name, *arguments))


class LeadEngine:
    """A `TrainEngine` whose every call is made on all ranks."""

    def __init__(self, engine: ShardedEngine, ranks: Ranks) -> None:
        self._engine = engine
        self._ranks = ranks
        self._publishers = ranks.beside()

    @property
    def step_count(self) -> int:
        return self._engine.step_count

    @property
    def replays_experts(self) -> bool:
        return self._engine.replays_experts

    def prepare(self) -> None:
        _order(self._ranks, "prepare")
        self._engine.prepare()

    def train_step(self, batch: TrainerBatch) -> Mapping[str, float]:
        """Make a step on all ranks' shares of a batch; the metrics are those of all.

        Raises:
            AstraflowError: What makes all ranks refuse the batch; weights are what they were.
            RanksApartError: What ends the trainer.
        """
        with together():
            _order(self._ranks, "train_step", batch.header.batch_id)
            self._ranks.agree(None)
            return self._engine.train_step(batch)

    def at_version(self, version: int) -> None:
        _order(self._ranks, "at_version", version)
        self._engine.at_version(version)

    def before_change(self, call: Callable[[], None]) -> None:
        self._engine.before_change(call)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the master weights, f32 DTensors."""
        return self._engine.named_parameters()

    def save(self, directory: Path) -> None:
        """Begin to write a checkpoint, each rank its rows."""
        _order(self._ranks, "save", directory.absolute())
        self._engine.save(directory)

    def wait_for_save(self) -> None:
        """Wait until all ranks have written theirs, which they do without an order."""
        self._engine.wait_for_save()

    def restore(self, directory: Path) -> None:
        """Go on from a checkpoint, whatever the number of ranks that wrote it."""
        _order(self._ranks, "restore", directory.absolute())
        self._engine.restore(directory)

    def publishing(self, policy_id: PolicyId, layout: Layout) -> "LeadPublishing":
        own = shard_publisher(policy_id, layout, self._ranks)
        return LeadPublishing(own, self._engine, self._ranks, publishers=self._publishers)

    def leave(self) -> None:
        self._ranks.broadcast(None)


class LeadPublishing(Publishing):
    """Publishes versions of which every rank has its rows; rank 0 announces them."""

    def __init__(
        self, own: WeightPublisher, engine: ShardedEngine, ranks: Ranks, *, publishers: Ranks
    ) -> None:
        """Publish nothing yet; `ranks` speak on the thread that trains, `publishers` beside it.

        The tokens of the trainer's session go over a store of torch.distributed, which like its
        other connections knows no TLS: ranks belong into a network that is closed to others.
        """
        super().__init__(own, rank_count=ranks.data_count)
        self._engine = engine
        self._rows: Mapping[str, Tensor] = {}
        self._ranks = ranks
        self._publishers = publishers
        self._host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        self._store = TCPStore(self._host, 0, is_master=True, wait_for_workers=False)

    def order(self, version: int, step: int, restored_from: int | None) -> None:
        """Have the other ranks encode their rows, beside their steps as here."""
        _order(self._ranks, "publish", version, step, restored_from)
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
        return publish_shard(
            self.own,
            rows,
            self._publishers,
            version=version,
            step=step,
            restored_from=restored_from,
        )

    def endpoints(self, own: str) -> tuple[WeightEndpoint, ...]:
        """Return where all ranks serve their rows; rank 0 does at `own`."""
        _order(self._ranks, "serve")
        said = self._ranks.all_gather_object((self._ranks.publishes, self._ranks.shard_rank, own))
        return tuple(
            WeightEndpoint(rank=rank, endpoint=endpoint)
            for publishes, rank, endpoint in said
            if publishes
        )

    def entered(self, client: TrainerClient) -> None:
        """Let all ranks in with the session of rank 0, now and whenever it is another one."""
        client.on_session(lambda session: self._store.set(SESSION, session.token.hex()))
        client.on_transfer_token(lambda token: self._store.set(TRANSFER, token.hex()))
        super().entered(client)
        registration = client.registration
        place = (self._host, self._store.port)
        _order(self._ranks, "join", place, registration.run_id, registration.signing_seed)
