"""UCX in an event loop and thread of its own: its context is one per process, and of one loop.

`ucxx` where it is installed, else its predecessor `ucp`; both are extras.
"""

import asyncio
import importlib
from collections.abc import Coroutine
from functools import cache
from threading import Thread
from typing import Any, Final, TypeVar

import numpy as np

from astraflow.core.errors import AstraflowError, Reason
from astraflow.transport.frames import HEADER_NBYTES, Frame, bad_frame, unpack
from astraflow.transport.inbox import source_lost

Result = TypeVar("Result")

_MODULES: Final = ("ucxx", "ucp")
_TRUNCATED: Final = "Truncated"


class UcxThread:
    """Runs what talks UCX."""

    def __init__(self, ucx: Any) -> None:
        """Start the thread; it ends with the process."""
        self.ucx = ucx
        self._loop = asyncio.new_event_loop()
        Thread(target=self._loop.run_forever, name="astraflow-ucx", daemon=True).start()

    def start(self, work: Coroutine[Any, Any, Result]) -> "asyncio.Future[Result]":
        """Run work over there; return its result over here."""
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


@cache
def ucx_thread() -> UcxThread:
    """Return the thread of this process.

    Raises:
        AstraflowError: LANE_UNAVAILABLE when UCX is not installed.
    """
    for name in _MODULES:
        try:
            return UcxThread(importlib.import_module(name))
        except ImportError:
            continue
    raise AstraflowError(
        Reason.LANE_UNAVAILABLE, "UCX is not installed: pip install 'astraflow[ucx]'"
    )


async def send_frame(endpoint: Any, header: bytes, body: bytes | memoryview = b"") -> None:
    """Send a frame as one message, or two.

    Raises:
        AstraflowError: SOURCE_UNREACHABLE.
    """
    try:
        # Messages of one tag arrive in the order in which they were begun.
        await asyncio.gather(
            *(endpoint.send(np.frombuffer(each, np.uint8)) for each in (header, body) if len(each))
        )
    except Exception as error:  # see `_failure`
        raise _failure(error) from error


async def receive_header(endpoint: Any) -> Frame:
    """Receive the header of a frame.

    Raises:
        AstraflowError: CHUNK_INVALID, SOURCE_UNREACHABLE.
    """
    header = np.empty(HEADER_NBYTES, np.uint8)
    await receive_into(endpoint, header)
    return unpack(header.data)


async def receive_into(endpoint: Any, array: np.ndarray) -> None:
    """Receive a message into an array of bytes.

    Raises:
        AstraflowError: CHUNK_INVALID when it is longer; SOURCE_UNREACHABLE.
    """
    try:
        await endpoint.recv(array)
    except Exception as error:  # see `_failure`
        raise _failure(error) from error


def _failure(error: Exception) -> AstraflowError:
    """Return what an error of UCX means; its classes differ between the two modules."""
    if _TRUNCATED in type(error).__name__:
        return bad_frame("a message is longer than it said")
    return source_lost(f"the UCX endpoint failed: {error or type(error).__name__}")
