"""Weights & Biases: a run per policy, grouped by the run's name. WANDB_* variables hold."""

import importlib
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from astraflow.launch.tracking.tracker import Tracked


class WeightsAndBiases:
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
        """Log one row."""
        del time
        self._run.log({axis: at, **values})

    def flush(self) -> None:
        """Do nothing: rows are on the disk when they are logged."""

    def close(self) -> None:
        """Wait until all is sent."""
        self._run.finish()
