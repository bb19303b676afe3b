"""What strangers send, while it is read: its room in memory, and the one thread that reads it.

Large texts and pickles are read one after the other: many at once would each take memory, and keep
the event loop from the interpreter.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from traceback import clear_frames
from typing import Any, Final, TypeVar

from astraflow.core.errors import AstraflowError, Reason

JSON_NBYTES: Final = 16 << 20
"""Of any JSON: its text may take four times as much."""

# Above it, reading goes to the thread.
_QUICK_NBYTES: Final = 1 << 14
# So much of everything needs no room.
_FREE_NBYTES: Final = 1 << 16
# A dict of one field takes 240 bytes, a list 60; a layout of 80,000 tensors fits.
_MAX_CONTAINERS: Final = 1 << 18
_MAX_VALUES: Final = 1 << 19
_READER: Final = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reader")

Value = TypeVar("Value")


class ReadBudget:
    """Bytes of all that is being read: of one host as much as one body may have, of all twice."""

    def __init__(self) -> None:
        self._held: Counter[str | None] = Counter()

    def reserve(self, host: str | None, held: int, nbytes: int, max_nbytes: int) -> int:
        """Make room for a body that grows; return what it holds from now on.

        Raises:
            AstraflowError: OVERLOADED where others take it all.
        """
        grown = max(0, nbytes - _FREE_NBYTES) - held
        mine, all_of_us = self._held[host] + grown, self._held.total() + grown
        if grown > 0 and (mine > max_nbytes or all_of_us > 2 * max_nbytes):
            why = "other large bodies are being read; send it again"
            raise AstraflowError(Reason.OVERLOADED, why, retryable=True)
        self._held[host] = mine
        return held + grown

    def release(self, host: str | None, held: int) -> None:
        self._held[host] -= held
        if not self._held[host]:
            del self._held[host]


async def read(
    reader: Callable[[bytearray], Value], raw: bytearray, *, quick_nbytes: int = _QUICK_NBYTES
) -> Value:
    """Return what a pure reader makes of bytes, off the event loop where they are many."""
    if len(raw) < quick_nbytes:
        return reader(raw)
    return await asyncio.get_running_loop().run_in_executor(_READER, _read, reader, raw)


def _read(reader: Callable[[bytearray], Value], raw: bytearray) -> Value:
    """Leave nothing behind in the frames of an error: to free it takes long too."""
    try:
        return reader(raw)
    except Exception as error:
        clear_frames(error.__traceback__)
        raise


def read_json(raw: bytearray) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: It is none, or of more values than anything here has.
    """
    if raw.count(b"[") + raw.count(b"{") > _MAX_CONTAINERS or raw.count(b",") > _MAX_VALUES:
        raise ValueError("it has too many values")
    try:
        # At a call of Python the event loop may have its turn: without any, a layout of 80,000
        # tensors keeps the interpreter for 80 ms.
        return json.loads(raw, object_hook=_given, parse_int=_int)
    except RecursionError:
        raise ValueError("it is too deep") from None


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return fields


def _int(digits: str) -> int:
    return int(digits)
