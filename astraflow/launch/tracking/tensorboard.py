"""TensorBoard: event files below the run's folder, a series per policy."""

from collections.abc import Mapping
from datetime import datetime
from time import time_ns
from typing import Any, cast

import tensorboardX  # pyright: ignore[reportMissingTypeStubs]

from astraflow.launch.tracking.tracker import Tracked


class TensorBoard:
    """Writes `tensorboard/POLICY`; look at it with `tensorboard --logdir runs/NAME`."""

    def __init__(self, tracked: Tracked) -> None:
        make = cast("Any", tensorboardX).SummaryWriter
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
        """Write what is buffered."""
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
