"""Run events: operators steer, the hub breaks or comes back, time passes."""

from dataclasses import dataclass
from datetime import timedelta

from astraflow.core.errors import Failure
from astraflow.core.status import StopMode


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPaused:
    """An operator stops new tasks. Answer: None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResumed:
    """An operator lets tasks flow again. Answer: None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequested:
    """An operator asks for a checkpoint of the run. Answer: None; `Run.saved` tells when it is.

    Raises:
        AstraflowError: INVALID_FIELD, RUN_ENDED; NOT_READY when a trainer is missing.
    """

    checkpoint_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStopped:
    """An operator ends the run. Answer: None.

    Attributes:
        mode: DRAIN finishes what is out and trains on it; CANCEL drops it.
        grace: Then a drain becomes a cancel; None: no limit.
    """

    mode: StopMode
    grace: timedelta | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBroken:
    """The hub cannot go on, such as with a data set that it cannot read. Answer: None."""

    failure: Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class HubRestarted:
    """The hub came back with the state that its journal holds. Answer: None.

    Every session is renewed, and what the hub was about to do for itself is asked for again. What
    was on its way to a member is sent again when the member resumes its session.

    Attributes:
        software: Release of the hub; empty: it does not say.
    """

    software: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked:
    """Time passed: `Run.next_deadline` is reached. Answer: None."""


RunEvent = RunPaused | RunResumed | SaveRequested | RunStopped | RunBroken | HubRestarted | Ticked
