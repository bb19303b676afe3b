"""The run as a trainer sees it: batches in, versions and acks out, all blocking calls."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Self

from astraflow.core.batches import BatchHeader, BatchOutcome, BatchPart, EndOfData
from astraflow.core.ids import BatchId
from astraflow.core.members import Directive, RegisterTrainer, TrainerLoad, TrainerRegistration
from astraflow.core.versions import VersionInfo


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
    """A trainer's place in a run; see `/docs`."""

    def __init__(self, *, hub: str, token: str, register: RegisterTrainer) -> None:
        self._args = (hub, token, register)
        self.end_of_data: EndOfData | None = None

    def __enter__(self) -> Self:
        raise NotImplementedError

    def __exit__(self, *_: object) -> None:
        raise NotImplementedError

    @property
    def registration(self) -> TrainerRegistration:
        """What the run said when it admitted the trainer."""
        raise NotImplementedError

    @property
    def transfer_token(self) -> bytes:
        """The secret that pullers of weights show."""
        raise NotImplementedError

    def on_transfer_token(self, callback: Callable[[bytes], None]) -> None:
        """Call back with the transfer token, now and whenever it changes."""
        raise NotImplementedError

    @property
    def directive(self) -> Directive:
        """What the run asks for."""
        raise NotImplementedError

    def batches(
        self, *, rank: int = 0, world_size: int = 1, max_tokens: int = 0, prefetch: int = 1
    ) -> Iterator[TrainerBatch]:
        """Yield batches until the data ends."""
        raise NotImplementedError

    def publish_version(self, info: VersionInfo, *, checkpoint_id: str = "") -> int:
        """Announce weights that can now be pulled; return the next version's number."""
        raise NotImplementedError

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
        """Settle a batch."""
        raise NotImplementedError

    def report_load(self, load: TrainerLoad) -> None:
        """Say how busy the trainer is."""
        raise NotImplementedError
