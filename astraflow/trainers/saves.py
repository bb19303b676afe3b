"""Saves: checkpoints that are due, and those that the run asks for."""

from concurrent.futures import Future
from time import perf_counter
from typing import Protocol

from astraflow.config.recipe import Trainer
from astraflow.core.batches import AckBatch
from astraflow.trainers.checkpoints import Checkpoints

# What a trainer that is killed loses at most, where the recipe does not say.
_CHECKPOINT_S = 600.0


class SaveClient(Protocol):
    """What is needed of a trainer's place in a run; `TrainerClient` has it."""

    def take_save_order(self) -> str:
        """Return the checkpoint that the run asked for since the last call; empty: none."""
        ...

    def ack_later(self, ack: AckBatch, *, checkpoint: Future[str] | None) -> None:
        """Settle a batch, once a checkpoint is written, while the caller goes on."""
        ...

    def flush(self) -> None:
        """Wait for what was announced and settled."""
        ...


class Saves:
    """Writes a checkpoint when one is asked for or due.

    Attributes:
        last: The ack of the newest batch; None: there was none in this process.
    """

    def __init__(self, client: SaveClient, checkpoints: Checkpoints, settings: Trainer) -> None:
        """Count from now.

        Args:
            client: Of the run.
            checkpoints: Where they are written.
            settings: When they are due.
        """
        self.last: AckBatch | None = None
        self._client = client
        self._checkpoints = checkpoints
        self._settings = settings
        self._saved = perf_counter()
        # Asked for before there was a batch to tell of it.
        self._asked = ""
        self._written: set[str] = set()

    def after_step(self, step: int, version: int | None) -> Future[str] | None:
        """Begin to write a checkpoint if one is due; return its id, once it is whole."""
        asked = self._take_order()
        return self._write(asked, step, version) if asked or self.need_save(step) else None

    def need_save(self, step: int) -> bool:
        """Whether a checkpoint is due: the last one before its batch is acknowledged, too."""
        if step == self._settings.step_count:
            return True
        every = self._settings.checkpoint_every
        return perf_counter() - self._saved >= _CHECKPOINT_S if every is None else step % every == 0

    def when_asked(self, step: int, version: int | None) -> None:
        """Save while there is nothing to train on, if the run asks; the last ack says so again."""
        asked = self._take_order()
        if self.last is None:
            self._asked = asked
        elif asked:
            self._client.ack_later(self.last, checkpoint=self._write(asked, step, version))

    def _take_order(self) -> str:
        """Return what was asked for and is not written; an order may come again."""
        asked, self._asked = self._client.take_save_order() or self._asked, ""
        return "" if asked in self._written else asked

    def _write(self, asked: str, step: int, version: int | None) -> Future[str]:
        # It names a version that the run knows.
        self._client.flush()
        written = self._checkpoints.begin(
            step=step, version=version, checkpoint_id=asked, then=self._thin_out
        )
        self._written.add(asked)
        self._saved = perf_counter()
        return written

    def _thin_out(self) -> None:
        keep = self._settings.save.keep
        if keep is not None or self._settings.checkpoint_every is None:
            self._checkpoints.thin_out(keep)
