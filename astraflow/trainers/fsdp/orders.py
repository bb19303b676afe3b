"""Orders: what rank 0, which has the trainer's place in the run, has all other ranks do with it."""

from dataclasses import dataclass
from pathlib import Path

from astraflow.core.ids import BatchId


@dataclass(frozen=True, slots=True)
class Prepare:
    """Load the first weights."""


@dataclass(frozen=True, slots=True)
class Serve:
    """Serve this rank's rows, and say where."""


@dataclass(frozen=True, slots=True)
class Join:
    """Read this rank's share of a run's batches, with the secrets at a port of rank 0."""

    host: str
    port: int
    run_id: str


@dataclass(frozen=True, slots=True)
class AtVersion:
    """The present weights are this version."""

    version: int


@dataclass(frozen=True, slots=True)
class TrainStep:
    """Make a step on this rank's share of a batch."""

    batch_id: BatchId


@dataclass(frozen=True, slots=True)
class PublishVersion:
    """Publish this rank's rows."""

    version: int
    step: int
    restored_from: int | None


@dataclass(frozen=True, slots=True)
class Save:
    """Write this rank's rows into a directory that all ranks see."""

    directory: Path


@dataclass(frozen=True, slots=True)
class Restore:
    """Go on from a checkpoint."""

    directory: Path


@dataclass(frozen=True, slots=True)
class Leave:
    """There is nothing more to do."""


RankOrder = Prepare | Serve | Join | AtVersion | TrainStep | PublishVersion | Save | Restore | Leave
