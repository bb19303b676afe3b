"""MLflow: an experiment per run, a run per policy. MLFLOW_TRACKING_URI says where."""

import importlib
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from astraflow.launch.tracking.tracker import Tracked


class MlFlow:
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

    def flush(self) -> None:
        """Do nothing: rows are sent as they are logged."""

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._run_id)
