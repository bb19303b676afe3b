"""Publishing: who encodes the versions of a trainer, and where they are served."""

from typing import Protocol, runtime_checkable

from astraflow.client.trainer import TrainerClient
from astraflow.core.ids import PolicyId
from astraflow.core.layout import Layout
from astraflow.core.versions import WeightEndpoint
from astraflow.trainers.engine import TrainEngine
from astraflow.trainers.origin import Publisher
from astraflow.weights.publish.publisher import WeightPublisher


class Publishing(Publisher, Protocol):
    """Encodes versions, here and on the other ranks of a trainer."""

    @property
    def own(self) -> WeightPublisher:
        """Of what this process serves."""
        ...

    @property
    def rank_count(self) -> int:
        """Ranks that share every batch."""
        ...

    def order(self, version: int, step: int, restored_from: int | None) -> None:
        """Have all ranks encode a version of their present weights; `publish` does so here."""
        ...

    def endpoints(self, own: str) -> tuple[WeightEndpoint, ...]:
        """Return where versions are served, this process's endpoint first."""
        ...

    def entered(self, client: TrainerClient) -> None:
        """Note that the trainer has its place in the run."""
        ...


@runtime_checkable
class SharesOut(Protocol):
    """An engine whose weights lie on several ranks, and are published from there."""

    def publishing(self, policy_id: PolicyId, layout: Layout) -> Publishing:
        """Return what publishes them."""
        ...


def publishing_of(engine: TrainEngine, policy_id: PolicyId, layout: Layout) -> Publishing:
    """Return what publishes an engine's weights."""
    if isinstance(engine, SharesOut):
        return engine.publishing(policy_id, layout)
    return _HerePublishing(WeightPublisher(policy_id, layout))


class _HerePublishing:
    """All is encoded and served by this process."""

    def __init__(self, own: WeightPublisher) -> None:
        self.own = own
        self.publish = own.publish

    @property
    def rank_count(self) -> int:
        return 1

    @property
    def is_damaged(self) -> bool:
        return self.own.is_damaged

    def order(self, version: int, step: int, restored_from: int | None) -> None:
        del version, step, restored_from

    def endpoints(self, own: str) -> tuple[WeightEndpoint, ...]:
        return (WeightEndpoint(rank=0, endpoint=own),)

    def entered(self, client: TrainerClient) -> None:
        del client
