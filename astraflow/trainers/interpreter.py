"""The interpreter that training shares with all that goes on beside it."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

_SWITCH_INTERVAL_S: Final = 1e-4


@contextmanager
def shared_interpreter() -> Generator[None]:
    """Have threads beside training let go of the interpreter soon when a step needs it.

    A step needs it for some microseconds between two operations of torch, which compute without it.
    Who encodes and serves versions meanwhile may keep it for 5 ms by Python's own setting: as long
    as many operations of a small model take.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
