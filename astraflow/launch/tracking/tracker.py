"""What a tracker is, and the ones there are."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Protocol

from astraflow.core.code import load
from astraflow.core.errors import AstraflowError, Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracked:
    """Whose numbers a tracker gets: those of one policy of a run.

    Attributes:
        run: Name of the run.
        policy: Of the run.
        folder: Where the tracker may keep files.
        recipe: Of the run, resolved, as plain values.
    """

    run: str
    policy: str
    folder: Path
    recipe: Mapping[str, Any]


class Tracker(Protocol):
    """Shows numbers; made as `Tracker(Tracked(...))`, called from one thread."""

    def log(self, axis: str, at: int, time: datetime, values: Mapping[str, float]) -> None:
        """Take the numbers of one step or one evaluated version.

        Args:
            axis: step or version.
            at: Which.
            time: When it was done.
            values: By name, such as train/loss.
        """
        ...

    def flush(self) -> None:
        """Return when nothing is lost with this process."""
        ...

    def close(self) -> None:
        """Say that nothing more comes."""
        ...


_TRACKERS: Final = {
    "tensorboard": "astraflow.launch.tracking.tensorboard:TensorBoard",
    "wandb": "astraflow.launch.tracking.wandb:WeightsAndBiases",
    "mlflow": "astraflow.launch.tracking.mlflow:MlFlow",
    "trackio": "astraflow.launch.tracking.trackio:Trackio",
}
PACKAGES: Final = {
    "tensorboard": "tensorboardX",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
}
"""What each of them imports."""


def make_tracker(name: str, tracked: Tracked) -> Tracker:
    """Make a tracker by name, or by module:Class.

    Raises:
        AstraflowError: INVALID_FIELD for a name that is none; CODE_UNKNOWN when its package is
            not installed.
    """
    if ":" not in name and name not in _TRACKERS:
        names = ", ".join(_TRACKERS)
        raise AstraflowError(
            Reason.INVALID_FIELD, f"{name} is no tracker: take {names}, or give module:Class"
        )
    make = load(_TRACKERS.get(name, name), what=f"the tracker {name}")
    try:
        return make(tracked)
    except ModuleNotFoundError as error:
        raise AstraflowError(
            Reason.CODE_UNKNOWN,
            f"the tracker {name} needs the package {error.name}, which is not installed here"
            + ("" if ":" in name else ": pip install 'astraflow[track]'"),
        ) from error
