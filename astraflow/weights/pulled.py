"""What came of a pull."""

from dataclasses import dataclass, field
from datetime import timedelta

from astraflow.core.errors import AstraflowError
from astraflow.core.updates import WeightUpdate
from astraflow.core.versions import SourceReport


@dataclass(frozen=True, slots=True, kw_only=True)
class PullTimes:
    """Where the time between a request and a staged version went.

    Attributes:
        verify: Of the pull: comparing digests of what came.
        decode: From the last chunk to the state of the version, decoded and verified.
        stage: From there until what the engine is to change lies ready.
    """

    verify: timedelta = timedelta()
    decode: timedelta = timedelta()
    stage: timedelta = timedelta()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """A version that arrived.

    Attributes:
        update: What it asks of the engine.
        nbytes: Payload received and verified, from all sources.
        duration: First request to last chunk verified.
        reports: One per source tried.
        times: What else took its time.
    """

    update: WeightUpdate
    nbytes: int
    duration: timedelta
    reports: tuple[SourceReport, ...]
    times: PullTimes = field(default_factory=PullTimes)


class PullFailed(AstraflowError):  # noqa: N818 - it says what happened, as AstraflowError's reasons do
    """A version could not be had; what was held is held still.

    Attributes:
        reports: One per source tried.
    """

    def __init__(self, cause: AstraflowError, reports: tuple[SourceReport, ...]) -> None:
        """Say why.

        Args:
            cause: The failure of the last source, or of the last verification.
            reports: One per source tried.
        """
        others = [f"{each.address}: {each.failure.message}" for each in reports if each.failure]
        message = "; ".join(dict.fromkeys([cause.message, *others]))
        super().__init__(cause.reason, message, retryable=cause.retryable, metadata=cause.metadata)
        self.reports = reports
