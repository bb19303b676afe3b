"""How busy a trainer is, measured where it takes and settles batches."""

from collections.abc import Generator
from contextlib import contextmanager
from threading import Lock

from astraflow.core.clock import Clock
from astraflow.core.ids import BatchId
from astraflow.core.members import TrainerLoad


class TrainerLoadMeter:
    """Adds up between two reports; used by the trainer's thread and by the event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = Lock()
        self._tokens: dict[BatchId, int] = {}
        self._step = 0
        self._trained_count = 0
        self._waited_s = 0.0
        self._waiting_since: float | None = None
        self._reported_at = clock.monotonic()

    @contextmanager
    def waiting(self) -> Generator[None]:
        """Count the time in the body as waiting for a batch."""
        with self._lock:
            self._waiting_since = self._clock.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._count_wait(self._clock.monotonic())
                self._waiting_since = None

    def took(self, batch_id: BatchId, token_count: int) -> None:
        """Note a batch that is trained on from now."""
        with self._lock:
            self._tokens[batch_id] = token_count

    def settled(self, batch_id: BatchId, *, step: int, is_trained: bool) -> None:
        """Note what became of a batch."""
        with self._lock:
            token_count = self._tokens.pop(batch_id, 0)
            if is_trained:
                self._step = step
                self._trained_count += token_count

    def report(self) -> TrainerLoad:
        """Return the load since the last report, and begin a new one."""
        with self._lock:
            now = self._clock.monotonic()
            self._count_wait(now)
            span_s = max(now - self._reported_at, 1e-9)
            load = TrainerLoad(
                step=self._step,
                held_batch_count=len(self._tokens),
                tokens_per_s=self._trained_count / span_s,
                wait_fraction=min(1.0, self._waited_s / span_s),
            )
            self._reported_at, self._trained_count, self._waited_s = now, 0, 0.0
            return load

    def _count_wait(self, now: float) -> None:
        if self._waiting_since is not None:
            self._waited_s += now - self._waiting_since
            self._waiting_since = now
