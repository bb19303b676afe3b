"""What a tracker is, and the ones there are: TensorBoard, Weights & Biases, MLflow, trackio."""

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from time import time_ns
from typing import Any, Final, Protocol

from astraflow.config.extras import cure_of
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
        """Return when nothing is lost with this process; it is nothing to do where that is sure."""

    def close(self) -> None:
        """Say that nothing more comes."""
        ...


_TRACKERS: Final = {
    "tensorboard": "astraflow.launch.tracking.trackers:TensorBoard",
    "wandb": "astraflow.launch.tracking.trackers:WeightsAndBiases",
    "mlflow": "astraflow.launch.tracking.trackers:MlFlow",
    "trackio": "astraflow.launch.tracking.trackers:Trackio",
}

PACKAGES: Final = {
    "tensorboard": "tensorboardX",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
}

"""What each of them imports."""


def must_be_tracker(name: str) -> None:
    """Refuse a name that is none.

    Raises:
        AstraflowError: INVALID_FIELD.
    """
    if ":" not in name and name not in _TRACKERS:
        names = ", ".join(_TRACKERS)
        raise AstraflowError(
            Reason.INVALID_FIELD, f"{name} is no tracker: take {names}, or give module:Class"
        )


def make_tracker(name: str, tracked: Tracked) -> Tracker:
    """Make a tracker by name, or by module:Class.

    Raises:
        AstraflowError: INVALID_FIELD for a name that is none; CODE_UNKNOWN when its package is
            not installed.
    """
    must_be_tracker(name)
    make = load(_TRACKERS.get(name, name), what=f"the tracker {name}")
    try:
        return make(tracked)
    except ModuleNotFoundError as error:
        raise AstraflowError(
            Reason.CODE_UNKNOWN,
            f"the tracker {name} needs the package {error.name}, which is not installed here"
            + ("" if (cure := cure_of(error.name or "")) is None else f": {cure}"),
        ) from error


def _summary_writer() -> Any:
    """Return tensorboardX's writer, imported without torch: a launcher has no tensors to show."""
    modules: dict[str, Any] = sys.modules
    if "torch" in modules:
        return importlib.import_module("tensorboardX").SummaryWriter
    modules["torch"] = None
    try:
        return importlib.import_module("tensorboardX").SummaryWriter
    finally:
        del modules["torch"]


class TensorBoard(Tracker):
    """Writes `tensorboard/POLICY`; look at it with `tensorboard --logdir runs/NAME`."""

    def __init__(self, tracked: Tracked) -> None:
        make = _summary_writer()
        # Its own names are of a second: who follows again within one would overwrite the file.
        own = f".{time_ns()}"
        folder = str(tracked.folder / tracked.policy)
        self._writer: Any = make(logdir=folder, filename_suffix=own)

    def log(self, axis: str, at: int, time: datetime, values: Mapping[str, float]) -> None:
        """Write scalars; evaluations are at the number of their version."""
        del axis
        for name, value in values.items():
            self._writer.add_scalar(name, value, at, walltime=time.timestamp())

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases(Tracker):
    """Logs to the project `astraflow`, unless WANDB_PROJECT says otherwise."""

    def __init__(self, tracked: Tracked) -> None:
        api: Any = importlib.import_module("wandb")
        self._run: Any = api.init(
            project=api.env.get_project() or "astraflow",
            group=tracked.run,
            name=f"{tracked.run}/{tracked.policy}",
            config=dict(tracked.recipe),
            dir=str(tracked.folder),
            reinit="create_new",
        )
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric("eval/*", step_metric="version")

    def log(self, axis: str, at: int, time: datetime, values: Mapping[str, float]) -> None:
        del time
        self._run.log({axis: at, **values})

    def close(self) -> None:
        """Wait until all is sent."""
        self._run.finish()


class MlFlow(Tracker):
    """Logs scalars in batches."""

    def __init__(self, tracked: Tracked) -> None:
        api: Any = importlib.import_module("mlflow")
        self._make_metric: Any = api.entities.Metric
        self._client: Any = api.MlflowClient()
        found = self._client.get_experiment_by_name(tracked.run)
        experiment = found.experiment_id if found else self._client.create_experiment(tracked.run)
        run = self._client.create_run(experiment, run_name=tracked.policy)
        self._run_id: str = run.info.run_id
        self._client.log_dict(self._run_id, dict(tracked.recipe), "recipe.json")

    def log(self, axis: str, at: int, time: datetime, values: Mapping[str, float]) -> None:
        """Log one row; evaluations are at the number of their version."""
        del axis
        stamp = int(time.timestamp() * 1e3)
        rows = [self._make_metric(name, value, stamp, at) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=rows)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


class Trackio(Tracker):
    """Logs to a run per policy."""

    def __init__(self, tracked: Tracked) -> None:
        api: Any = importlib.import_module("trackio")
        self._run: Any = api.init(
            project=tracked.run, name=tracked.policy, config=dict(tracked.recipe)
        )

    def log(self, axis: str, at: int, time: datetime, values: Mapping[str, float]) -> None:
        """Log one row; evaluations are at the number of their version."""
        del axis, time
        self._run.log(dict(values), step=at)

    def close(self) -> None:
        self._run.finish()
