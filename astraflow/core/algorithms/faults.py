"""Faults of data algorithms: code of others that fails ends the run, and breaks nothing."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from astraflow.core.algorithms.plug_in import PlugIn
from astraflow.core.errors import Failure, Reason

P = ParamSpec("P")
T = TypeVar("T")


class Faults:
    """Calls algorithms, and remembers the first one that failed.

    Attributes:
        first: Why the run cannot go on; None: all went well.
    """

    def __init__(self) -> None:
        self.first: Failure | None = None

    def call(
        self, where: str, default: T, function: Callable[P, T], *args: P.args, **more: P.kwargs
    ) -> T:
        """Return what an algorithm says, or a default when it raises.

        Args:
            where: Names it.
            default: What does no harm until the run ends.
            function: Its method.
            *args: For it.
            **more: For it.
        """
        try:
            return function(*args, **more)
        except Exception as error:  # noqa: BLE001 - whatever the code of others may raise
            self.note(where, f"{type(error).__name__}: {error}")
            return default

    def metrics(self, prefix: str, algorithm: PlugIn) -> dict[str, float]:
        """Return the numbers of an algorithm under a prefix."""

        def read() -> dict[str, float]:
            found = algorithm.metrics().items()
            return {f"{prefix}/{name}": float(value) for name, value in found}

        return self.call(prefix, dict[str, float](), read)

    def note(self, where: str, what: str) -> None:
        """Remember that an algorithm failed."""
        self.first = self.first or Failure(
            reason=Reason.INTERNAL,
            message=f"{where} failed ({what}); mend its code, or take it out of the recipe",
        )
