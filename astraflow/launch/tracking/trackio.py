"""trackio: a project per run, on this machine. Look at it with `trackio show`."""

import importlib
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from astraflow.launch.tracking.tracker import Tracked


class Trackio:
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

    def flush(self) -> None:
        """Do nothing: rows are on the disk when they are logged."""

    def close(self) -> None:
        """End the run."""
        self._run.finish()
