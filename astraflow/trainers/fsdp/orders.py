"""What rank 0 gives to all other ranks: orders, and the tokens of the trainer's session.

The tokens go over a store of torch.distributed, which like its other connections knows no TLS:
ranks belong into a network that is closed to others.
"""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Self

import structlog
from torch._C._distributed_c10d import TCPStore

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
    signing_seed: bytes = field(repr=False)


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

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_KEY = "secrets"

_LOOK_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSecrets:
    """What ranks show to the run, and have to be shown by those who pull.

    Attributes:
        session: Token of the trainer's session.
        transfer: Token of transfers.
    """

    session: bytes = b""
    transfer: bytes = b""

    def to_text(self) -> str:
        """Return them for the store."""
        return json.dumps({name: value.hex() for name, value in asdict(self).items()})

    @classmethod
    def from_text(cls, text: bytes) -> Self:
        """Read what `to_text` returned."""
        return cls(**{name: bytes.fromhex(value) for name, value in json.loads(text).items()})


class SecretsBoard:
    """Rank 0's: others see what it was told last.

    Attributes:
        host: Where it is.
        port: Where it is.
    """

    def __init__(self) -> None:
        """Listen on the address of rank 0 that torchrun has told all ranks."""
        self.host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        self._store = TCPStore(self.host, 0, is_master=True, wait_for_workers=False)
        self.port = self._store.port
        self._lock = Lock()
        self._session = self._transfer = b""

    def set_session(self, token: bytes) -> None:
        """Show the session's token; from any thread."""
        with self._lock:
            self._session = token
            self._show()

    def set_transfer(self, token: bytes) -> None:
        """Show the token of transfers; from any thread."""
        with self._lock:
            self._transfer = token
            self._show()

    def _show(self) -> None:
        secrets = RankSecrets(session=self._session, transfer=self._transfer)
        self._store.set(_KEY, secrets.to_text())


class SecretsReader:
    """Another rank's: looks once a second, in a thread of its own, until it is closed."""

    def __init__(self, host: str, port: int, *, changed: Callable[[RankSecrets], None]) -> None:
        """Read nothing before `with`.

        Args:
            host: Of the board.
            port: Of the board.
            changed: Called with them at first, and from another thread whenever they change.
        """
        self._store = TCPStore(host, port, is_master=False)
        self._changed = changed
        self._over = Event()
        self._last = RankSecrets()
        self._thread = Thread(target=self._follow, name="astraflow-secrets", daemon=True)

    def __enter__(self) -> Self:
        """Read them, and start to look."""
        self._poll()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop to look."""
        self._over.set()
        self._thread.join()

    def _follow(self) -> None:
        try:
            while not self._over.wait(_LOOK_S):
                self._poll()
        except RuntimeError as error:
            # Rank 0 is gone: the next collective says so.
            log.info("no more secrets come from rank 0", why=str(error))

    def _poll(self) -> None:
        found = RankSecrets.from_text(self._store.get(_KEY))
        if found != self._last:
            self._last = found
            self._changed(found)
