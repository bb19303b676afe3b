"""How a run goes on: paused, stopped, failed, over."""

from dataclasses import dataclass
from datetime import datetime

from astraflow.core.errors import Failure
from astraflow.core.status import RunState, StopMode


@dataclass(slots=True, kw_only=True, eq=False)
class RunLifecycle:
    """How the run goes on.

    Attributes:
        is_paused: By an operator.
        stop: How it was stopped; None: it was not.
        stop_time: When a drain becomes a cancel.
        final_time: When it was over; None: it is not.
        is_closed: Whether the hub was asked to exit.
        shown: State that was announced last.
    """

    start_time: datetime
    is_paused: bool = False
    stop: StopMode | None = None
    stop_time: datetime | None = None
    failure: Failure | None = None
    final_time: datetime | None = None
    is_final: bool = False
    is_closed: bool = False
    shown: RunState = RunState.WAITING

    @property
    def is_ending(self) -> bool:
        """Whether nothing new is begun: it is stopped, or over."""
        return self.is_final or self.stop is not None

    @property
    def is_held(self) -> bool:
        """Whether no training is issued: it is paused. One that is stopped finishes what is out."""
        return self.is_paused and self.stop is None

    def pause(self, *, is_paused: bool) -> None:
        """Issue no training until it is resumed."""
        self.is_paused = is_paused

    def fail(self, failure: Failure | None) -> None:
        """Note why the run cannot go on; the first reason counts."""
        if not self.is_final:
            self.failure = self.failure or failure

    def order_stop(self, mode: StopMode, *, cancel_time: datetime | None = None) -> None:
        """Stop it; at the time of a cancel, of which the earliest counts, it is cancelled."""
        self.stop = mode
        if cancel_time is not None:
            self.stop_time = min(self.stop_time or cancel_time, cancel_time)

    def finish(self, now: datetime) -> None:
        """Note that it is over; members have their grace to leave from now on."""
        self.final_time, self.is_final = now, True

    def reopen(self) -> None:
        self.stop = self.stop_time = self.failure = self.final_time = None
        self.is_final = self.is_closed = False
