"""What one body may cost: steps, bytes, depth; asked before anything is made."""

from dataclasses import dataclass
from typing import Any, cast

from astraflow.core.errors import AstraflowError, Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class PickleLimits:
    """Bounds on one body.

    Attributes:
        steps: Instructions, those of nested torch files included. One makes at most one small
            object, so memory is bounded by some 100 bytes a step beside `copy_share`.
        copy_share: Bytes that may be copied out of a body, as a multiple of its size.
        depth: Of containers within containers.
        visit_share: Values in the result, counted once for every place where they stand, as a
            multiple of the body's size: a value that is written once may stand in many places.
    """

    steps: int = 4_000_000
    copy_share: int = 4
    depth: int = 64
    visit_share: int = 8


# A body of a few bytes may still say something.
_LEAST_NBYTES = 1 << 12


class Budget:
    """What is left of the limits, for a body and the torch files in it."""

    def __init__(self, limits: PickleLimits, body_nbytes: int) -> None:
        self.limits = limits
        self._steps = limits.steps
        self._visits = limits.visit_share * body_nbytes + _LEAST_NBYTES
        self._nbytes = limits.copy_share * body_nbytes + _LEAST_NBYTES

    def visit(self) -> None:
        """Take one value of the result."""
        self._visits -= 1
        if self._visits < 0:
            raise refused("it has too many values within values")

    def step(self) -> None:
        """Take one step."""
        self._steps -= 1
        if self._steps < 0:
            raise refused(f"it has more than {self.limits.steps} instructions")

    def spend(self, nbytes: int) -> None:
        """Take memory, before it is allocated."""
        self._nbytes -= nbytes
        if self._nbytes < 0:
            raise refused(f"it would take more than {self.limits.copy_share} times its size")


def refused(why: str) -> AstraflowError:
    """Return the error of every body that is not read."""
    return AstraflowError(Reason.INVALID_FIELD, f"the pickled body is refused: {why}")


def require_tuple(value: Any, why: str) -> tuple[Any, ...]:
    """Return a value that is a tuple.

    Raises:
        AstraflowError: INVALID_FIELD with the reason given.
    """
    if type(value) is not tuple:
        raise refused(why)
    return cast("tuple[Any, ...]", value)
