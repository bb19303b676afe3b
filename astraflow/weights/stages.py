"""Stages: where the time of one piece of work went."""

from time import perf_counter


class Stages:
    """Seconds by stage; one begins where the one before ended.

    Attributes:
        seconds: By name, ending in `_s`, to a tenth of a millisecond.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._started = perf_counter()

    def end(self, name: str) -> None:
        """End the stage that is running, and give it its name."""
        now = perf_counter()
        self.seconds[f"{name}_s"] = round(now - self._started, 4)
        self._started = now
