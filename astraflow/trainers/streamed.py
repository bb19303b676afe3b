"""Streams of batches for frameworks that keep the loop in their own hands."""

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

from astraflow.client.trainer import TrainerBatch
from astraflow.core.errors import AstraflowError, Reason


class BatchIterator:
    """Hands batches to a loop that iterates over them, one at a time, in a thread of its own.

    The loop that asks for the next batch has made a step of the one before. So an engine's
    `train_step` is a call of `step`, and between two calls nobody touches the weights.

    Example:
        stream = BatchIterator()
        stream.start(Trainer(data=stream).train)
        stream.step(batch)
    """

    def __init__(self) -> None:
        self._batches = SimpleQueue[TrainerBatch]()
        self._asked = SimpleQueue[Exception | None]()
        self._end: AstraflowError | None = None

    def __iter__(self) -> Iterator[TrainerBatch]:
        """Yield batches, on the thread that trains; asking for one settles the one before."""
        while True:
            self._asked.put(None)
            yield self._batches.get()

    def start(self, train: Callable[[], object]) -> None:
        """Begin to train, and wait until the first batch is asked for.

        Args:
            train: Iterates over this stream until it ends.

        Raises:
            AstraflowError: INTERNAL when it failed before.
        """
        # It waits for batches when the process ends.
        threading.Thread(target=self._run, args=(train,), name="streamed", daemon=True).start()
        self._wait()

    def step(self, batch: TrainerBatch) -> None:
        """Have one step made of a batch.

        Raises:
            AstraflowError: INTERNAL when the loop has ended, with what it raised.
        """
        if self._end is not None:
            raise self._end
        self._batches.put(batch)
        self._wait()

    def _run(self, train: Callable[[], object]) -> None:
        error: Exception | None = None
        try:
            train()
        except Exception as raised:  # noqa: BLE001 - it is raised where the step is waited for
            error = raised
        self._end = _ended(error)
        self._asked.put(error and self._end)

    def _wait(self) -> None:
        error = self._asked.get()
        if error is not None:
            raise error


def _ended(error: Exception | None) -> AstraflowError:
    why = "it has made all of its steps" if error is None else f"{type(error).__name__}: {error}"
    ended = AstraflowError(
        Reason.INTERNAL, f"the loop that trains has ended ({why}); have it iterate without a limit"
    )
    ended.__cause__ = error
    return ended
